/* Pictures of another size, cut into patches: the levels of Pillow's and torch's resize with antialias, to the bit.

   Two passes of weighted sums, whose weights are integers. Rows of the picture are first resized in width, two at a
   time, and kept as planes; a row of the result is blended of those while they are in the cache, and its pieces go
   where patches have them. As in those two, what lies between the passes is rounded to levels.

   Filters and weights: Pillow's Resample.c, as torch's `upsample_avx_bilinear_bicubic_uint8` has them, in its order
   of operations. `core_resize` is not of these: it blends rows first, and keeps fractions between the passes. */
#include "core.h"
#include "parts.h"
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__) && !defined(CORE_PLAIN)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define LANES 32 /* rows of planes are as many bytes, times something */

/* The taps of one axis: result i is the sum of weights[i * stride + k] times pixel first[i] + k, k < used. */
typedef struct {
    int64_t stride, used; /* multiples of 4; `used` is the most that any result has */
    int64_t bits;         /* of weights */
    int32_t *first;
    int16_t *weights; /* 0 behind a result's last tap */
} taps;

/* Keys, "Cubic convolution interpolation for digital image processing" (1981), with a = -0.5 */
static double weight_at(int64_t reach, double x) {
    const double a = -0.5;
    x = x < 0 ? -x : x;
    if (reach == 1)
        return x < 1 ? 1 - x : 0;
    if (x < 1)
        return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? ((a * x - 5 * a) * x + 8 * a) * x - 4 * a : 0;
}

static double support_of(int64_t reach, int64_t from, int64_t to) {
    return from > to ? (double)reach * ((double)from / (double)to) : (double)reach;
}

static int64_t most_taps(int64_t reach, int64_t from, int64_t to) {
    float support = (float)support_of(reach, from, to);
    int64_t whole = (int64_t)support;
    return 2 * (whole + ((float)whole < support)) + 1;
}

static int64_t stride_of(int64_t reach, int64_t from, int64_t to) { return (most_taps(reach, from, to) + 3) / 4 * 4; }

/* `exact`: [to][stride], overwritten. */
static void find_taps(taps *t, double *exact, int64_t reach, int64_t from, int64_t to) {
    double scale = (double)from / (double)to, support = support_of(reach, from, to), most = 0;
    double inverse = scale >= 1 ? 1 / scale : 1;
    int64_t limit = most_taps(reach, from, to);
    t->used = 1;
    for (int64_t i = 0; i < to; i++) {
        double centre = scale * ((double)i + 0.5), sum = 0, *own = exact + i * t->stride;
        int64_t first = MAX((int64_t)(centre - support + 0.5), 0);
        int64_t size = MIN((int64_t)(centre + support + 0.5), from) - first;
        size = MIN(MAX(size, 0), limit);
        for (int64_t k = 0; k < t->stride; k++) {
            own[k] = k < size ? weight_at(reach, ((double)(k + first) - centre + 0.5) * inverse) : 0;
            sum += own[k];
        }
        for (int64_t k = 0; k < size && sum != 0; k++) {
            own[k] /= sum;
            most = MAX(most, own[k]);
        }
        t->first[i] = (int32_t)first;
        t->used = MAX(t->used, size);
    }
    t->used = (t->used + 3) / 4 * 4;
    t->bits = 0;
    while (t->bits < 22 && (int64_t)(0.5 + most * (double)(1 << (t->bits + 1))) < 1 << 15)
        t->bits++;
    for (int64_t i = 0; i < to * t->stride; i++) {
        double weight = exact[i] * (double)(1 << t->bits);
        t->weights[i] = (int16_t)(weight < 0 ? weight - 0.5 : weight + 0.5);
    }
}

/* ---- a row becomes planes of another width ------------------------------------------------------------------- */

/* [columns, rounded up to 16][used / 2][8] weights of two taps, four times over, for `widen_rows`. */
static void fill_table(int16_t *table, int32_t *first, const taps *t, int64_t columns) {
    for (int64_t x = 0; x < (columns + 15) / 16 * 16; x++) {
        first[x] = x < columns ? 3 * t->first[x] : 0;
        for (int64_t k = 0; k < t->used; k += 2)
            for (int64_t i = 0; i < 8; i++)
                *table++ = x < columns ? t->weights[x * t->stride + k + i % 2] : 0;
    }
}

/* One pixel of two rows: red, green, blue and what means nothing, of either. */
AVX2 static inline __attribute__((always_inline)) __m256i sum_of_two(const uint8_t *one, const uint8_t *other,
                                                                     const __m128i *weights, int64_t fours,
                                                                     __m256i half, __m128i bits) {
    /* Of four pixels: the reds of the first two side by side, their greens and blues; and those of the others. */
    const __m256i before = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
    const __m256i after = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1));
    __m256i sum = half;
    for (int64_t four = 0; four < fours; four++) {
        __m256i taken = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(one + 12 * four))),
            _mm_loadu_si128((const __m128i *)(other + 12 * four)), 1);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(taken, before),
                                                      _mm256_broadcastsi128_si256(weights[2 * four])));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(taken, after),
                                                      _mm256_broadcastsi128_si256(weights[2 * four + 1])));
    }
    return _mm256_sra_epi32(sum, bits);
}

/* Two rows, of which 16 bytes more may be read than the taps need. */
AVX2 static inline __attribute__((always_inline)) void widen_by(const uint8_t *one, const uint8_t *other,
                                                                  const int32_t *first, const int16_t *table,
                                                                  int64_t fours, int64_t bits, int64_t columns,
                                                                  int64_t plane, uint8_t *to, uint8_t *to_other) {
    const __m256i by_colour = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m256i half = _mm256_set1_epi32(1 << (bits - 1));
    const __m128i shift = _mm_cvtsi64_si128(bits), *weights = (const __m128i *)table;
    for (int64_t x = 0; x < columns; x += 16) {
        __m256i colours[4];
        for (int64_t four = 0; four < 4; four++) {
            __m256i sums[4];
            for (int64_t i = 0; i < 4; i++, weights += 2 * fours) {
                int64_t at = first[x + 4 * four + i];
                sums[i] = sum_of_two(one + at, other + at, weights, fours, half, shift);
            }
            colours[four] = _mm256_shuffle_epi8(
                _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]), _mm256_packs_epi32(sums[2], sums[3])),
                by_colour);
        }
        __m256i reds_greens = _mm256_unpacklo_epi32(colours[0], colours[1]);
        __m256i more = _mm256_unpacklo_epi32(colours[2], colours[3]);
        __m256i blues = _mm256_unpacklo_epi64(_mm256_unpackhi_epi32(colours[0], colours[1]),
                                              _mm256_unpackhi_epi32(colours[2], colours[3]));
        __m256i planes[3] = {_mm256_unpacklo_epi64(reds_greens, more), _mm256_unpackhi_epi64(reds_greens, more), blues};
        for (int64_t c = 0; c < 3; c++) {
            _mm_storeu_si128((__m128i *)(to + c * plane + x), _mm256_castsi256_si128(planes[c]));
            _mm_storeu_si128((__m128i *)(to_other + c * plane + x), _mm256_extracti128_si256(planes[c], 1));
        }
    }
}

AVX2 static void widen_rows(const uint8_t *one, const uint8_t *other, const int32_t *first, const int16_t *table,
                            int64_t fours, int64_t bits, int64_t columns, int64_t plane, uint8_t *to,
                            uint8_t *to_other) {
    if (fours == 1)
        widen_by(one, other, first, table, 1, bits, columns, plane, to, to_other);
    else
        widen_by(one, other, first, table, fours, bits, columns, plane, to, to_other);
}

/* ---- rows become one ------------------------------------------------------------------------------------------ */

/* `lines`: [used] rows of n bytes; n is a multiple of LANES. */
AVX2 static inline __attribute__((always_inline)) void blend(const uint8_t *const *lines, const int16_t *weights,
                                                             int64_t used, int64_t bits, int64_t n, uint8_t *to) {
    const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(1 << (bits - 1));
    const __m128i shift = _mm_cvtsi64_si128(bits);
    for (int64_t x = 0; x < n; x += LANES) {
        __m256i sums[4] = {half, half, half, half};
        for (int64_t k = 0; k < used; k += 2) {
            __m256i pair = _mm256_set1_epi32((uint16_t)weights[k] | (uint32_t)(uint16_t)weights[k + 1] << 16);
            __m256i a = _mm256_loadu_si256((const __m256i *)(lines[k] + x));
            __m256i b = _mm256_loadu_si256((const __m256i *)(lines[k + 1] + x));
            __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
            sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(_mm256_unpacklo_epi8(low, zero), pair));
            sums[1] = _mm256_add_epi32(sums[1], _mm256_madd_epi16(_mm256_unpackhi_epi8(low, zero), pair));
            sums[2] = _mm256_add_epi32(sums[2], _mm256_madd_epi16(_mm256_unpacklo_epi8(high, zero), pair));
            sums[3] = _mm256_add_epi32(sums[3], _mm256_madd_epi16(_mm256_unpackhi_epi8(high, zero), pair));
        }
        for (int64_t i = 0; i < 4; i++)
            sums[i] = _mm256_sra_epi32(sums[i], shift);
        _mm256_storeu_si256((__m256i *)(to + x), _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]),
                                                                     _mm256_packs_epi32(sums[2], sums[3])));
    }
}

AVX2 static void blend_rows(const uint8_t *const *lines, const int16_t *weights, int64_t used, int64_t bits, int64_t n,
                            uint8_t *to) {
    if (used == 4)
        blend(lines, weights, 4, bits, n, to);
    else
        blend(lines, weights, used, bits, n, to);
}

/* ---- a row goes where patches have it ---------------------------------------------------------------------------- */

static inline __attribute__((always_inline)) void scatter(const core_picture *p, int64_t y, int64_t across,
                                                          const uint8_t *planes, int64_t plane) {
    int64_t area = p->down * across, in_band = p->columns / across * p->merge, row = y / p->down;
    uint8_t *band = p->out + (row / p->merge * in_band + row % p->merge * p->merge) * 3 * area + y % p->down * across;
    for (int64_t at = 0, x = 0; x < p->columns; at += p->merge * p->merge)
        for (int64_t i = 0; i < p->merge; i++, x += across)
            for (int64_t c = 0; c < 3; c++)
                memcpy(band + (3 * (at + i) + c) * area, planes + c * plane + x, (size_t)across);
}

static void put_row(const core_picture *p, int64_t y, const uint8_t *planes, int64_t plane) {
    if (p->across == 14)
        scatter(p, y, 14, planes, plane);
    else if (p->across == 16)
        scatter(p, y, 16, planes, plane);
    else
        scatter(p, y, p->across, planes, plane);
}

int64_t core_patches(const core_picture *p) {
    if (!__builtin_cpu_supports("avx2"))
        return 1;
    int64_t plane = (p->columns + LANES - 1) / LANES * LANES, line = 3 * plane, pixels = 3 * p->width;
    taps rows = {.stride = stride_of(p->reach, p->height, p->rows)};
    taps columns = {.stride = stride_of(p->reach, p->width, p->columns)};
    int64_t kept = rows.stride + 1, looks = pixels + 3 * columns.stride + 16; /* bytes of a row that are read */
    int64_t exact = MAX(p->rows * rows.stride, p->columns * columns.stride);
    int64_t nbytes = 8 * exact + 4 * (p->rows + p->columns + plane) + 2 * rows.stride * p->rows + line * (kept + 1) +
                     2 * columns.stride * p->columns + 8 * plane * columns.stride + looks + 8 * rows.stride;
    uint8_t *memory = aligned_alloc(64, (size_t)(nbytes + 12 * 64) / 64 * 64), *rest = memory;
    if (!memory)
        return -1;
    double *doubles = next_part(&rest, 8 * exact);
    rows.first = next_part(&rest, 4 * p->rows);
    columns.first = next_part(&rest, 4 * p->columns);
    rows.weights = next_part(&rest, 2 * rows.stride * p->rows);
    columns.weights = next_part(&rest, 2 * columns.stride * p->columns);
    int32_t *first = next_part(&rest, 4 * plane);
    int16_t *table = next_part(&rest, 8 * plane * columns.stride);
    uint8_t *ring = next_part(&rest, line * kept), *result = next_part(&rest, line), *last = next_part(&rest, looks);
    const uint8_t **lines = next_part(&rest, 8 * rows.stride);
    find_taps(&rows, doubles, p->reach, p->height, p->rows);
    find_taps(&columns, doubles, p->reach, p->width, p->columns);
    fill_table(table, first, &columns, p->columns);
    memset(last, 0, (size_t)looks);
    memset(ring, 0, (size_t)(line * kept));
    for (int64_t y = 0, next = 0; y < p->rows; y++) {
        while (next < MIN(rows.first[y] + rows.used, p->height)) {
            const uint8_t *one = p->pixels + next * p->stride, *other = one + p->stride;
            int64_t at = next % kept, other_at = (next + 1) % kept;
            if ((next + 1) * p->stride + looks > (p->height - 1) * p->stride + pixels) {
                other = one = memcpy(last, one, (size_t)pixels); /* what lies behind may not be read */
                other_at = at;
                next--;
            }
            next += 2;
            widen_rows(one, other, first, table, columns.used / 4, columns.bits, p->columns, plane, ring + at * line,
                       ring + other_at * line);
        }
        for (int64_t k = 0; k < rows.used; k++)
            lines[k] = ring + MIN(rows.first[y] + k, p->height - 1) % kept * line;
        blend_rows(lines, rows.weights + y * rows.stride, rows.used, rows.bits, line, result);
        put_row(p, y, result, plane);
    }
    free(memory);
    return 0;
}
#else
int64_t core_patches(const core_picture *p) {
    (void)p;
    return 1;
}
#endif
