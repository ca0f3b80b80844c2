/* Words of eight bytes, little-endian, that may lie anywhere. */
#ifndef DATAFLOW_WORDS_H
#define DATAFLOW_WORDS_H
#include <stdint.h>
#include <string.h>

static inline uint64_t word_at(const uint8_t *data) {
    uint64_t word;
    memcpy(&word, data, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}
#endif
