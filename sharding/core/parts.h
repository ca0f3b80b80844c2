/* The memory of one call, in parts. */
#ifndef DATAFLOW_PARTS_H
#define DATAFLOW_PARTS_H
#include <stdint.h>

/* The next `nbytes` of memory, which begin at a multiple of 64 like those before. */
static inline void *next_part(uint8_t **memory, int64_t nbytes) {
    void *part = *memory;
    *memory += (nbytes + 63) / 64 * 64;
    return part;
}
#endif
