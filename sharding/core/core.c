/* Kernels of build plans; see core.h. */
#define _GNU_SOURCE
#include "core.h"
#include "variants.h"
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define GROUP 64              /* values that one system call copies */
#define SCRATCH (64 << 10)    /* bytes that go through the cache at a time, read by the kernel and then widened */
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

static const uint8_t *source_of(const core_column *c, int64_t row) {
    return (const uint8_t *)(intptr_t)(c->base + c->step * c->index[row]);
}

static uint8_t *target_of(const core_column *c, int64_t row) {
    return c->out + (c->offsets ? c->offsets[row] : c->out_step * row);
}

static int64_t bytes_of(const core_column *c, int64_t row) { return c->lengths ? c->lengths[row] : c->each; }

/* ---- widening ------------------------------------------------------------------------------------------- */

#define WIDEN(name, type)                                                                                        \
    VARIANTS static void widen_##name(const uint8_t *from, int64_t *restrict to, int64_t n) {                    \
        for (int64_t i = 0; i < n; i++) {                                                                        \
            type value; /* stored values lie anywhere */                                                         \
            memcpy(&value, from + i * (int64_t)sizeof value, sizeof value);                                      \
            to[i] = value;                                                                                       \
        }                                                                                                        \
    }
WIDEN(u8, uint8_t)
WIDEN(i8, int8_t)
WIDEN(u16, uint16_t)
WIDEN(i16, int16_t)
WIDEN(u32, uint32_t)
WIDEN(i32, int32_t)

typedef void (*widen_fn)(const uint8_t *, int64_t *restrict, int64_t);
static const widen_fn WIDENERS[] = {widen_u8, widen_i8, widen_u16, widen_i16, widen_u32, widen_i32};
static const int64_t WIDTHS[] = {1, 1, 2, 2, 4, 4};

static void put(const core_column *c, const uint8_t *from, uint8_t *to, int64_t nbytes) {
    if (c->op == CORE_WIDEN)
        WIDENERS[c->stored](from, (int64_t *)to, nbytes / WIDTHS[c->stored]);
    else
        memcpy(to, from, (size_t)nbytes);
}

/* ---- values that may be touched ------------------------------------------------------------------------- */

/* Rows of a few bytes: what takes time is to wait for memory, so many are asked for at a time. */
#define AHEAD 16

#define TAKE(name, type)                                                                                         \
    static void take_##name(const core_column *c, int64_t first, int64_t last) {                                 \
        for (int64_t row = first; row < last; row++) {                                                           \
            if (row + AHEAD < last) __builtin_prefetch(source_of(c, row + AHEAD));                               \
            memcpy(c->out + row * c->out_step, source_of(c, row), sizeof(type));                            \
        }                                                                                                        \
    }
TAKE(1, uint8_t)
TAKE(2, uint16_t)
TAKE(4, uint32_t)
TAKE(8, uint64_t)

static void take_small(const core_column *c, int64_t first, int64_t last) {
    int64_t n = c->each;
    for (int64_t row = first; row < last; row++) {
        if (row + AHEAD < last) {
            const uint8_t *next = source_of(c, row + AHEAD);
            for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(next + i);
            __builtin_prefetch(next + n - 1);
        }
        const uint8_t *from = source_of(c, row);
        uint8_t *to = c->out + row * c->out_step;
        for (int64_t i = 0; i + 16 <= n; i += 16) memcpy(to + i, from + i, 16);
        memcpy(to + n - 16, from + n - 16, 16); /* the rest, and some bytes twice */
    }
}

static void load_rows(const core_column *c, int64_t first, int64_t last) {
    if (c->op == CORE_COPY && !c->lengths && !c->offsets) switch (c->each) {
        case 1: take_1(c, first, last); return;
        case 2: take_2(c, first, last); return;
        case 4: take_4(c, first, last); return;
        case 8: take_8(c, first, last); return;
        default:
            if (c->each >= 16 && c->each <= 512) {
                take_small(c, first, last);
                return;
            }
        }
    for (int64_t row = first; row < last; row++) {
        if (row + 2 < last) { /* the first lines of a page that nobody else asks for */
            const uint8_t *next = source_of(c, row + 2);
            int64_t nbytes = bytes_of(c, row + 2);
            __builtin_prefetch(next);
            __builtin_prefetch(next + MIN(64, nbytes));
            __builtin_prefetch(next + MIN(4096, nbytes));
        }
        put(c, source_of(c, row), target_of(c, row), bytes_of(c, row));
    }
}

/* ---- values whose pages may be gone ----------------------------------------------------------------------- */

/* Copies values of rows, one after the other, to where `to` says. Gives 0 if all came whole. */
static int read_rows(const struct iovec *from, const struct iovec *to, int64_t n, int64_t nbytes) {
    if (!nbytes) return 0;
    return process_vm_readv(getpid(), to, (unsigned long)n, from, (unsigned long)n, 0) != nbytes;
}

static int read_value(const core_column *c, int64_t row, uint8_t *scratch) {
    const uint8_t *from = source_of(c, row);
    uint8_t *to = target_of(c, row);
    int64_t left = bytes_of(c, row), width = c->op == CORE_WIDEN ? WIDTHS[c->stored] : 1;
    while (left > 0) {
        int64_t part = c->op == CORE_WIDEN ? MIN(left, SCRATCH) : left;
        struct iovec source = {(void *)(uintptr_t)from, (size_t)part};
        struct iovec target = {c->op == CORE_WIDEN ? scratch : to, (size_t)part};
        ssize_t got = process_vm_readv(getpid(), &target, 1, &source, 1, 0);
        if (got <= 0 || (c->op == CORE_WIDEN && got != part)) return 1;
        if (c->op == CORE_WIDEN) put(c, scratch, to, got);
        from += got;
        to += c->op == CORE_WIDEN ? got / width * 8 : got;
        left -= got;
    }
    return 0;
}

static void read_group(const core_column *c, int64_t first, int64_t last, uint8_t *scratch, uint8_t mark,
                       uint8_t *status) {
    struct iovec from[GROUP], to[GROUP];
    int64_t nbytes = 0;
    for (int64_t row = first; row < last; row++) {
        struct iovec *source = from + (row - first), *target = to + (row - first);
        source->iov_base = (void *)(uintptr_t)source_of(c, row);
        source->iov_len = target->iov_len = (size_t)bytes_of(c, row);
        target->iov_base = c->op == CORE_WIDEN ? scratch + nbytes : target_of(c, row);
        nbytes += bytes_of(c, row);
    }
    if (!(c->op == CORE_WIDEN && nbytes > SCRATCH) && !read_rows(from, to, last - first, nbytes)) {
        if (c->op == CORE_WIDEN)
            for (int64_t row = first; row < last; row++)
                put(c, to[row - first].iov_base, target_of(c, row), bytes_of(c, row));
        return;
    }
    for (int64_t row = first; row < last; row++) /* too much for one call, or some are gone: which? */
        if (read_value(c, row, scratch) && !status[row]) status[row] = mark;
}

/* What is widened goes through `scratch`, as many values at a time as it holds. */
static void read_column(const core_column *c, int64_t first, int64_t last, uint8_t *scratch, uint8_t mark,
                        uint8_t *status) {
    int64_t group = GROUP;
    if (c->op == CORE_WIDEN && !c->lengths) group = MAX(1, MIN(GROUP, SCRATCH / MAX(1, c->each)));
    for (int64_t row = first; row < last; row += group)
        read_group(c, row, MIN(row + group, last), scratch, mark, status);
}

/* ---- a plan ----------------------------------------------------------------------------------------------- */

int64_t core_run(const core_column *columns, int64_t num_columns, int64_t first, int64_t last, uint8_t *status) {
    int64_t bad = 0;
    uint8_t *scratch = 0;
    memset(status + first, 0, (size_t)(last - first));
    for (int64_t i = 0; i < num_columns; i++) {
        const core_column *c = columns + i;
        uint8_t mark = (uint8_t)MIN(i + 1, 255);
        if (c->may_load) {
            load_rows(c, first, last);
            continue;
        }
        if (c->op == CORE_WIDEN && !scratch) scratch = malloc(SCRATCH);
        if (c->op != CORE_WIDEN || scratch) {
            read_column(c, first, last, scratch, mark, status);
            continue;
        }
        for (int64_t row = first; row < last; row++) /* no memory to widen in */
            if (!status[row]) status[row] = mark;
    }
    free(scratch);
    for (int64_t row = first; row < last; row++) bad += status[row] != 0;
    return bad;
}

/* ---- columns to rows -------------------------------------------------------------------------------------- */

#define BLOCK 256 /* rows, which stay in the first cache */

/* Four columns at a time: a row gets neighbours in one line. */
#define INTERLEAVE(type)                                                                                         \
    static void interleave_##type(const void *const *columns, int64_t k, int64_t rows, type *restrict out) {     \
        for (int64_t begin = 0; begin < rows; begin += BLOCK) {                                                  \
            int64_t end = MIN(begin + BLOCK, rows), c = 0;                                                       \
            for (; c + 4 <= k; c += 4) {                                                                         \
                const type *p = columns[c], *q = columns[c + 1], *s = columns[c + 2], *t = columns[c + 3];       \
                int64_t r = begin;                                                                               \
                FOUR_ROWS_##type                                                                                 \
                for (; r < end; r++) {                                                                           \
                    type *to = out + r * k + c;                                                                  \
                    to[0] = p[r], to[1] = q[r], to[2] = s[r], to[3] = t[r];                                      \
                }                                                                                                \
            }                                                                                                    \
            for (; c < k; c++)                                                                                   \
                for (int64_t r = begin; r < end; r++) out[r * k + c] = ((const type *)columns[c])[r];            \
        }                                                                                                        \
    }
#define FOUR_ROWS_uint8_t
#define FOUR_ROWS_uint16_t
#define FOUR_ROWS_uint64_t

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLES
#endif
#endif
#ifdef SHUFFLES
typedef uint32_t four __attribute__((vector_size(16)));
#define LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)

/* Transposes the four rows from r on of four columns. */
static void four_rows(const uint32_t *p, const uint32_t *q, const uint32_t *s, const uint32_t *t, int64_t k,
                      uint32_t *to) {
    four a, b, c, d, rows[4];
    memcpy(&a, p, 16), memcpy(&b, q, 16), memcpy(&c, s, 16), memcpy(&d, t, 16);
    four ab = LOW(a, b), cd = LOW(c, d), ba = HIGH(a, b), dc = HIGH(c, d);
    rows[0] = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
    rows[1] = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
    rows[2] = __builtin_shufflevector(ba, dc, 0, 1, 4, 5);
    rows[3] = __builtin_shufflevector(ba, dc, 2, 3, 6, 7);
    for (int64_t i = 0; i < 4; i++) memcpy(to + i * k, rows + i, 16);
}
#define FOUR_ROWS_uint32_t \
    for (; r + 4 <= end; r += 4) four_rows(p + r, q + r, s + r, t + r, k, out + r * k + c);
#else
#define FOUR_ROWS_uint32_t
#endif

INTERLEAVE(uint8_t)
INTERLEAVE(uint16_t)
INTERLEAVE(uint32_t)
INTERLEAVE(uint64_t)

void core_interleave(const void *const *columns, int64_t num_columns, int64_t rows, int64_t width, void *out) {
    switch (width) {
    case 1: interleave_uint8_t(columns, num_columns, rows, out); break;
    case 2: interleave_uint16_t(columns, num_columns, rows, out); break;
    case 4: interleave_uint32_t(columns, num_columns, rows, out); break;
    case 8: interleave_uint64_t(columns, num_columns, rows, out); break;
    default: break;
    }
}

int64_t core_version(void) { return CORE_VERSION; }
