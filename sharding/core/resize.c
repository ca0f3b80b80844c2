/* Decoded images become results: cropped, resized, mirrored, in planes or not, as levels or as numbers. See core.h.

   A resize is two passes of weighted sums. Each row of the result is first blended of rows of the image, and
   then, while it is in the cache, of its own columns. Weights have 14 bits, and what lies between the passes 6
   bits below one level; sums are integers, so that any order of addition gives the same result. */
#include "core.h"
#include "parts.h"
#include "variants.h"
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define WEIGHT_BITS 14
#define BETWEEN_BITS 6 /* of what lies between the passes */
#define ROWS_SHIFT (WEIGHT_BITS - BETWEEN_BITS)
#define COLUMNS_SHIFT (WEIGHT_BITS + BETWEEN_BITS)
#define BLOCK 256 /* sums that stay in the first-level cache */
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* The taps of one axis: result i is the sum of weights[i * stride + k] times pixel first[i] + k, k < used. */
typedef struct {
    int64_t stride, used; /* both even; `used` is the most that any result has */
    int64_t *first;
    int16_t *weights; /* 0 behind a result's last tap */
} axis_taps;

/* Without the library of mathematics, which is not linked everywhere. */
static int64_t floor_of(double x) {
    int64_t whole = (int64_t)x;
    return whole - ((double)whole > x);
}

static int64_t ceil_of(double x) { return -floor_of(-x); }

static int64_t nearest_of(double x) { return (int64_t)(x + 0x1.8p52 - 0x1.8p52); } /* of two, the even one */

static double weight_at(int64_t filter, double x) {
    x = x < 0 ? -x : x;
    if (filter == CORE_BILINEAR)
        return x < 1 ? 1 - x : 0;
    /* Keys, "Cubic convolution interpolation for digital image processing" (1981), with a = -0.5 */
    if (x < 1)
        return (1.5 * x - 2.5) * x * x + 1;
    return x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0;
}

/* How far from its centre a result looks, in pixels of the image. */
static double reach_of(const core_form *f, double scale) {
    if (f->filter == CORE_AREA)
        return scale / 2;
    return (f->filter == CORE_BILINEAR ? 1 : 2) * (f->antialias && scale > 1 ? scale : 1);
}

static int64_t stride_for(double reach) { return 2 * ceil_of(reach) + 2; }

/* The taps of n results that divide [start, start + length); pixels lie in [least, past). */
static void find_taps(axis_taps *t, const core_form *f, double start, double length, int64_t least, int64_t past,
                      int64_t n, int64_t flip) {
    double scale = length / (double)n, reach = reach_of(f, scale), stretch = f->antialias && scale > 1 ? scale : 1;
    int is_area = f->filter == CORE_AREA;
    t->used = 2;
    memset(t->weights, 0, (size_t)(n * t->stride) * sizeof *t->weights);
    for (int64_t i = 0; i < n; i++) {
        double centre = start + ((double)i + 0.5) * scale, sum = 0, so_far = 0;
        int64_t first = floor_of(is_area ? centre - reach : centre - reach + 0.5);
        int64_t end = is_area ? ceil_of(centre + reach) : floor_of(centre + reach + 0.5);
        int64_t at = flip ? n - 1 - i : i, before = 0;
        int16_t *weights = t->weights + at * t->stride;
        first = MIN(MAX(first, least), past - 1);
        end = MIN(MAX(end, first + 1), MIN(past, first + t->stride));
        t->first[at] = first;
        t->used = MAX(t->used, (end - first + 1) / 2 * 2);
        for (int pass = 0; pass < 2; pass++)
            for (int64_t k = first; k < end; k++) {
                double weight = is_area ? MIN((double)k + 1, centre + reach) - MAX((double)k, centre - reach)
                                        : weight_at(f->filter, ((double)k - centre + 0.5) / stretch);
                if (pass == 0) {
                    sum += weight;
                    continue;
                }
                /* Rounded sums, and not rounded weights: however many there are, they add up to one. */
                so_far += weight;
                int64_t rounded = nearest_of(so_far / sum * (1 << WEIGHT_BITS));
                weights[k - first] = (int16_t)(rounded - before);
                before = rounded;
            }
    }
}

/* ---- rows of the image become one ----------------------------------------------------------------------- */

VARIANTS static void blend_two(const uint8_t *a, const uint8_t *b, int16_t wa, int16_t wb, int16_t *restrict to,
                               int64_t n) {
    for (int64_t i = 0; i < n; i++)
        to[i] = (int16_t)((a[i] * wa + b[i] * wb + (1 << (ROWS_SHIFT - 1))) >> ROWS_SHIFT);
}

VARIANTS static void blend_many(const uint8_t *from, int64_t stride, const int16_t *weights, int64_t used,
                                int16_t *restrict to, int64_t n) {
    int32_t sums[BLOCK];
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t size = MIN(n - start, BLOCK);
        for (int64_t i = 0; i < size; i++)
            sums[i] = 1 << (ROWS_SHIFT - 1);
        for (int64_t k = 0; k < used; k += 2) {
            int16_t wa = weights[k], wb = weights[k + 1];
            const uint8_t *a = from + k * stride + start, *b = wb ? a + stride : a; /* there may be no next row */
            if (wa || wb)
                for (int64_t i = 0; i < size; i++)
                    sums[i] += a[i] * wa + b[i] * wb;
        }
        for (int64_t i = 0; i < size; i++)
            to[start + i] = (int16_t)(sums[i] >> ROWS_SHIFT);
    }
}

/* ---- its columns become pixels, four bytes each ----------------------------------------------------------- */

static void sum_columns(const int16_t *from, const axis_taps *t, int64_t channels, int64_t n, uint8_t *to) {
    for (int64_t x = 0; x < n; x++)
        for (int64_t c = 0; c < channels; c++) {
            const int16_t *pixel = from + t->first[x] * channels + c, *weights = t->weights + x * t->stride;
            int32_t sum = 1 << (COLUMNS_SHIFT - 1);
            for (int64_t k = 0; k < t->used; k++)
                sum += weights[k] * pixel[k * channels];
            sum >>= COLUMNS_SHIFT;
            to[4 * x + c] = (uint8_t)MIN(MAX(sum, 0), 255);
        }
}

/* Three channels at a time, and four results: the table has, for every four of them and every two taps, the two
   weights four times over for the results 0, 2, 1 and 3, which is the order that packing undoes. */
typedef struct {
    int64_t pairs;
    int64_t *offsets; /* [n, rounded up to 4] in the row, of a result's first tap */
    int16_t *weights; /* [n / 4, rounded up][pairs][4][8] */
} table_of_three;

static const int64_t PLACE_OF[] = {0, 2, 1, 3};

static void fill_table(table_of_three *w, const axis_taps *t, int64_t n) {
    w->pairs = t->used / 2;
    for (int64_t x = 0; x < (n + 3) / 4 * 4; x++) {
        w->offsets[x] = x < n ? t->first[x] * 3 : 0;
        for (int64_t pair = 0; pair < w->pairs; pair++) {
            int16_t *to = w->weights + ((x / 4 * w->pairs + pair) * 4 + PLACE_OF[x % 4]) * 8;
            for (int64_t i = 0; i < 8; i++)
                to[i] = x < n ? t->weights[x * t->stride + 2 * pair + i % 2] : 0;
        }
    }
}

#if defined(__SSE2__)
static void sum_columns_of_three(const int16_t *from, const table_of_three *w, int64_t n, uint8_t *to) {
    for (int64_t x = 0; x < n; x += 4) {
        const __m128i *weights = (const __m128i *)(w->weights + x * w->pairs * 8);
        __m128i sums[4];
        for (int64_t j = 0; j < 4; j++) {
            const int16_t *pixel = from + w->offsets[x + j];
            sums[j] = _mm_set1_epi32(1 << (COLUMNS_SHIFT - 1));
            for (int64_t pair = 0; pair < w->pairs; pair++, pixel += 6) {
                __m128i a = _mm_loadl_epi64((const __m128i *)pixel), b = _mm_loadl_epi64((const __m128i *)(pixel + 3));
                __m128i sum = _mm_madd_epi16(_mm_unpacklo_epi16(a, b), weights[pair * 4 + PLACE_OF[j]]);
                sums[j] = _mm_add_epi32(sums[j], sum);
            }
            sums[j] = _mm_srai_epi32(sums[j], COLUMNS_SHIFT);
        }
        __m128i low = _mm_packs_epi32(sums[0], sums[1]), high = _mm_packs_epi32(sums[2], sums[3]);
        _mm_storeu_si128((__m128i *)(to + 4 * x), _mm_packus_epi16(low, high));
    }
}
#endif

#if defined(__SSE2__) && !defined(CORE_PLAIN)
#define AVX2 __attribute__((target("avx2")))

/* Two results, of three channels and one that means nothing. */
AVX2 static inline __attribute__((always_inline)) __m256i sum_two(const int16_t *one, const int16_t *other,
                                                                  const int16_t *weights, int64_t pairs) {
    /* Of two pixels that follow one another: red and red, green and green, blue and blue. */
    const __m256i side_by_side = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, 4, 5, 10, 11));
    __m256i sum = _mm256_set1_epi32(1 << (COLUMNS_SHIFT - 1));
    for (int64_t pair = 0; pair < pairs; pair++) {
        __m256i taken = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(one + 6 * pair))),
            _mm_loadu_si128((const __m128i *)(other + 6 * pair)), 1);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(taken, side_by_side),
                                                      _mm256_load_si256((const __m256i *)(weights + 32 * pair))));
    }
    return _mm256_srai_epi32(sum, COLUMNS_SHIFT);
}

AVX2 static inline __attribute__((always_inline)) void sum_four(const int16_t *from, const table_of_three *w,
                                                                int64_t x, int64_t pairs, uint8_t *to) {
    const int64_t *at = w->offsets + x;
    const int16_t *weights = w->weights + x * pairs * 8;
    __m256i packed = _mm256_packs_epi32(sum_two(from + at[0], from + at[2], weights, pairs),
                                        sum_two(from + at[1], from + at[3], weights + 16, pairs));
    _mm_storeu_si128((__m128i *)(to + 4 * x),
                     _mm_packus_epi16(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1)));
}

AVX2 static void sum_columns_of_three_avx2(const int16_t *from, const table_of_three *w, int64_t n, uint8_t *to) {
    if (w->pairs == 1)
        for (int64_t x = 0; x < n; x += 4)
            sum_four(from, w, x, 1, to);
    else
        for (int64_t x = 0; x < n; x += 4)
            sum_four(from, w, x, w->pairs, to);
}
#endif

typedef void (*sum_three_fn)(const int16_t *, const table_of_three *, int64_t, uint8_t *);

/* Null: there is nothing special for this processor. */
static sum_three_fn for_three(void) {
#if defined(__SSE2__) && !defined(CORE_PLAIN)
    if (__builtin_cpu_supports("avx2"))
        return sum_columns_of_three_avx2;
#endif
#if defined(__SSE2__)
    return sum_columns_of_three;
#else
    return 0;
#endif
}

/* ---- pixels become a row of the result -------------------------------------------------------------------- */

VARIANTS static void put_levels(const uint8_t *pixels, int64_t n, uint8_t *restrict to, int64_t step) {
    for (int64_t x = 0; x < n; x++)
        to[x * step] = pixels[4 * x];
}

VARIANTS static void put_plane(const uint8_t *pixels, int64_t n, uint8_t *restrict to) {
    for (int64_t x = 0; x < n; x++)
        to[x] = pixels[4 * x];
}

static void put_numbers(const uint8_t *pixels, int64_t n, const float *numbers, float *restrict to, int64_t step) {
    for (int64_t x = 0; x < n; x++)
        to[x * step] = numbers[pixels[4 * x]];
}

static void put_row(const core_form *f, const uint8_t *pixels, void *out, int64_t y) {
    int64_t step = f->planar ? 1 : f->channels, row = f->planar ? f->width : f->width * f->channels;
    for (int64_t c = 0; c < f->channels; c++) {
        int64_t at = y * row + c * (f->planar ? f->height * f->width : 1);
        if (f->numbers)
            put_numbers(pixels + c, f->width, f->numbers + 256 * c, (float *)out + at, step);
        else if (step == 1)
            put_plane(pixels + c, f->width, (uint8_t *)out + at);
        else
            put_levels(pixels + c, f->width, (uint8_t *)out + at, step);
    }
}

/* ---- images ------------------------------------------------------------------------------------------------ */

int64_t core_resize(const core_image *m, const core_form *f) {
    int64_t height = f->height, width = f->width, quads = (width + 3) / 4;
    axis_taps rows = {.stride = stride_for(reach_of(f, m->height / (double)height))};
    axis_taps columns = {.stride = stride_for(reach_of(f, m->width / (double)width))};
    table_of_three table;
    sum_three_fn sum_three = f->channels == 3 ? for_three() : 0;
    int64_t across = (m->past_column - m->least_column) * f->channels;
    int64_t behind = columns.stride * f->channels + 8; /* taps of weight 0 may lie there */
    int64_t nbytes = 8 * (height + width + 4 * quads) + 2 * (height * rows.stride + width * columns.stride) +
                     64 * quads * columns.stride / 2 + 2 * (across + behind) + 16 * quads;
    uint8_t *memory = aligned_alloc(64, (size_t)(nbytes + 8 * 64) / 64 * 64), *rest = memory;
    if (!memory)
        return -1;
    rows.first = next_part(&rest, 8 * height);
    columns.first = next_part(&rest, 8 * width);
    rows.weights = next_part(&rest, 2 * height * rows.stride);
    columns.weights = next_part(&rest, 2 * width * columns.stride);
    table.offsets = next_part(&rest, 8 * 4 * quads);
    table.weights = next_part(&rest, 64 * quads * columns.stride / 2);
    int16_t *row = next_part(&rest, 2 * (across + behind));
    uint8_t *pixels = next_part(&rest, 16 * quads);
    find_taps(&rows, f, m->top, m->height, m->least_row, m->past_row, height, 0);
    find_taps(&columns, f, m->left, m->width, m->least_column, m->past_column, width, m->flip);
    for (int64_t x = 0; x < width; x++)
        columns.first[x] -= m->least_column;
    if (sum_three)
        fill_table(&table, &columns, width);
    memset(row + across, 0, 2 * (size_t)behind);
    for (int64_t y = 0; y < height; y++) {
        const uint8_t *from = m->pixels + rows.first[y] * m->stride + m->least_column * f->channels;
        const int16_t *weights = rows.weights + y * rows.stride;
        if (rows.used == 2)
            blend_two(from, weights[1] ? from + m->stride : from, weights[0], weights[1], row, across);
        else
            blend_many(from, m->stride, weights, rows.used, row, across);
        if (sum_three)
            sum_three(row, &table, width, pixels);
        else
            sum_columns(row, &columns, f->channels, width, pixels);
        put_row(f, pixels, m->out, y);
    }
    free(memory);
    return 0;
}
