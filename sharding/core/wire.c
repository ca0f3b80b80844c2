/* Fields and packed numbers of protobuf messages; see core.h and `sharding.formats.records.wire`. */
#include "core.h"
#include "variants.h"
#include <string.h>

enum { VARINT = 0, FIXED64 = 1, SPAN = 2, FIXED32 = 5 };
#define HEAD_BYTES 5 /* of a tag or a length, at most: messages end below 2 GiB */
#define NUMBER_BYTES 10

/* The number that begins at `*at`, which then is where it ends. */
static inline int64_t number_at(const uint8_t *data, int64_t *at, int64_t end, int most_bytes, uint64_t *number) {
    *number = 0;
    for (int size = 0; size < most_bytes; size++) {
        if (*at >= end) return CORE_CUT;
        uint64_t byte = data[(*at)++];
        *number |= (byte & 0x7F) << 7 * size;
        if (byte < 0x80) return 0;
    }
    return CORE_LONG;
}

int64_t core_fields(const uint8_t *data, int64_t nbytes, const int64_t *starts, const int64_t *ends, int64_t n,
                    int64_t *out, int64_t most) {
    int64_t found = 0;
    for (int64_t message = 0; message < n; message++) {
        int64_t at = starts[message], end = ends[message];
        if (at < end && (at < 0 || end > nbytes)) return CORE_CUT;
        while (at < end) {
            uint64_t tag, size;
            int64_t failed = number_at(data, &at, end, HEAD_BYTES, &tag), wire = (int64_t)(tag & 7), start = at;
            if (failed) return failed;
            switch (wire) {
            case VARINT: failed = number_at(data, &at, end, NUMBER_BYTES, &size); break;
            case FIXED64: at += 8; break;
            case FIXED32: at += 4; break;
            case SPAN:
                failed = number_at(data, &at, end, HEAD_BYTES, &size);
                start = at;
                at += (int64_t)size;
                break;
            default: return CORE_WIRE_TYPE;
            }
            if (failed) return failed;
            if (at > end) return CORE_CUT;
            if (!(tag >> 3)) return CORE_NUMBER_0;
            if (found < most) {
                const int64_t field[] = {message, (int64_t)(tag >> 3), wire, start, at};
                for (int column = 0; column < 5; column++) out[column * most + found] = field[column];
            }
            found++;
        }
    }
    return found;
}

VARIANTS static int64_t num_below_128(const uint8_t *data, int64_t nbytes) {
    int64_t count = 0;
    for (int64_t i = 0; i < nbytes; i++) count += data[i] < 0x80;
    return count;
}

static inline uint64_t word_at(const uint8_t *data) {
    uint64_t word;
    memcpy(&word, data, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

/* Bit i: number i of 64 bytes is the last of a number. */
static inline uint64_t last_among(const uint8_t *data) {
    uint64_t last = 0;
    for (int i = 0; i < 8; i++) /* the highest bits of eight bytes become those of one */
        last |= (((~word_at(data + 8 * i) & 0x8080808080808080u) >> 7) * 0x0102040810204080u >> 56) << 8 * i;
    return last;
}

/* The numbers of a span: how many there are. Which bytes are last is found for 64 at a time, so that no step waits for
   the length of the number before. */
static int64_t numbers_in(const uint8_t *data, int64_t nbytes, int64_t start, int64_t end, int64_t *out, int64_t most) {
    int64_t found = 0, first = start;
    for (int64_t at = start; at < end; at += 64) {
        int64_t here = end - at < 64 ? end - at : 64;
        uint64_t last = 0;
        if (at + 64 <= nbytes)
            last = last_among(data + at) & (~(uint64_t)0 >> (64 - here));
        else
            for (int64_t i = 0; i < here; i++) last |= (uint64_t)(data[at + i] < 0x80) << i;
        for (; last; last &= last - 1) {
            int64_t past = at + __builtin_ctzll(last) + 1, size = past - first;
            uint64_t number = 0;
            if (size > NUMBER_BYTES) return CORE_LONG;
            if (size <= 8 && first + 8 <= nbytes) {
                number = word_at(data + first) & (0x7F7F7F7F7F7F7F7Fu >> (64 - 8 * size));
                /* the gaps between seven bits are closed, then those between pairs and fours of them */
                number = (number & 0x007F007F007F007Fu) | (number & 0x7F007F007F007F00u) >> 1;
                number = (number & 0x00003FFF00003FFFu) | (number & 0x3FFF00003FFF0000u) >> 2;
                number = (number & 0x000000000FFFFFFFu) | (number & 0x0FFFFFFF00000000u) >> 4;
            } else {
                for (int64_t i = 0; i < size; i++) number |= (uint64_t)(data[first + i] & 0x7F) << 7 * i;
            }
            if (found == most) return CORE_CUT; /* the bytes are others than when they were counted */
            out[found++] = (int64_t)number;
            first = past;
        }
    }
    return first < end ? CORE_CUT : found;
}

int64_t core_numbers(const uint8_t *data, int64_t nbytes, const int64_t *starts, const int64_t *ends, int64_t n,
                     int64_t *counts, int64_t *out, int64_t most) {
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t start = starts[i], end = ends[i], found = 0;
        if (start < end) {
            if (start < 0 || end > nbytes) return CORE_CUT;
            found = out ? numbers_in(data, nbytes, start, end, out + total, most - total)
                        : num_below_128(data + start, end - start);
            if (found < 0) return found;
        }
        counts[i] = found;
        total += found;
    }
    return total;
}
