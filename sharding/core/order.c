/* Seeded permutations, which mix samples, and draws of mixtures by tokens; see core.h,
   `sharding.order.permutations` and `sharding.mixture.token_schedule`. */
#include "core.h"
#include "variants.h"
#include <stdlib.h>

/* `splitmix64` of Steele, Lea & Flood (2014), as `sharding.order.permutations` has it. */
static inline uint64_t mixed(uint64_t z) {
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

VARIANTS static void hash(uint64_t *restrict out, int64_t n, uint64_t key, uint64_t low) {
    for (int64_t i = 0; i < n; i++) out[i] = (mixed((uint64_t)i ^ key) & ~low) | (uint64_t)i;
}

static void insert(uint64_t *keys, int64_t n) {
    for (int64_t i = 1; i < n; i++) {
        uint64_t key = keys[i];
        int64_t j = i;
        for (; j && keys[j - 1] > key; j--) keys[j] = keys[j - 1];
        keys[j] = key;
    }
}

/* Hashes lie evenly: about as many buckets as keys, by their highest bits, leave a few in each. */
static int sort(const uint64_t *keys, int64_t n, int bits, uint64_t *out) {
    int shift = 64 - (bits > 2 ? bits - 2 : 1);
    int64_t buckets = (int64_t)1 << (64 - shift), first = 0;
    int64_t *end = calloc((size_t)buckets, sizeof *end);
    if (!end) return -1;
    for (int64_t i = 0; i < n; i++) end[keys[i] >> shift]++;
    for (int64_t b = 0; b < buckets; b++) { /* where each begins; once filled, where it ends */
        int64_t count = end[b];
        end[b] = first;
        first += count;
    }
    for (int64_t i = 0; i < n; i++) out[end[keys[i] >> shift]++] = keys[i];
    for (int64_t b = 0, begin = 0; b < buckets; begin = end[b++]) insert(out + begin, end[b] - begin);
    free(end);
    return 0;
}

int64_t core_seeded_permutations(const int64_t *sizes, const uint64_t *keys, int64_t count, int64_t *out) {
    int64_t most = 0, start = 0, failed = 0;
    for (int64_t i = 0; i < count; i++)
        if (sizes[i] > most) most = sizes[i];
    uint64_t *hashed = malloc((size_t)(most ? most : 1) * sizeof *hashed);
    if (!hashed) return -1;
    for (int64_t i = 0; i < count && !failed; start += sizes[i++]) {
        int bits = sizes[i] > 1 ? 64 - __builtin_clzll((uint64_t)sizes[i] - 1) : 0;
        uint64_t low = ((uint64_t)1 << bits) - 1, *order = (uint64_t *)out + start;
        hash(hashed, sizes[i], keys[i], low);
        failed = sort(hashed, sizes[i], bits, order);
        for (int64_t j = 0; j < sizes[i]; j++) order[j] = (order[j] & low) + (uint64_t)start;
    }
    free(hashed);
    return failed;
}

int64_t core_token_draws(const int64_t *shares, int64_t *owed, const int64_t *lengths, int64_t *upcoming,
                         const int64_t *end, int64_t sources, uint16_t *out, int64_t most) {
    int64_t total = 0;
    for (int64_t s = 0; s < sources; s++) total += shares[s];
    for (int64_t taken = 0; taken < most; taken++) {
        int64_t best = -1, soonest = 0;
        for (int64_t s = 0; s < sources; s++) {
            if (!shares[s]) continue;
            if (upcoming[s] >= end[s]) return taken;
            if (owed[s] < 0) continue; /* it is ahead: the ideal mixture has not begun its next sample */
            int64_t left = total * lengths[upcoming[s]] - owed[s];
            if (best < 0 || (__int128)left * shares[best] < (__int128)soonest * shares[s]) best = s, soonest = left;
        }
        int64_t length = lengths[upcoming[best]++];
        for (int64_t s = 0; s < sources; s++) owed[s] += shares[s] * length;
        owed[best] -= total * length;
        out[taken] = (uint16_t)best;
    }
    return most;
}

enum { TOGETHER = 256 }; /* rows: one step of all of them after the other, which compilers make wide */

/* The numbers of rows: of each, the last block with first_row[block] <= row is found without a branch. */
VARIANTS static void numbers_of(const core_samples *s, const int64_t *restrict rows, int64_t n, int64_t *restrict out) {
    int64_t block[TOGETHER] = {0};
    for (int64_t left = s->blocks; left > 1; left -= left / 2)
        for (int64_t i = 0; i < n; i++) block[i] += s->first_row[block[i] + left / 2] <= rows[i] ? left / 2 : 0;
    for (int64_t i = 0; i < n; i++)
        out[i] = s->first_sample[block[i]] + (s->row_in_block ? s->row_in_block[rows[i]] : rows[i] - s->first_row[block[i]]);
}

VARIANTS static void mix_in(uint64_t *restrict z, const int64_t *restrict part, int64_t n) {
    for (int64_t i = 0; i < n; i++) z[i] = mixed(z[i] ^ (uint64_t)part[i]);
}

VARIANTS static void add_up(const uint64_t *restrict z, int64_t n, uint64_t *restrict sums) {
    uint64_t low = 0, high = 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t turned = z[i] << 32 | z[i] >> 32;
        low += z[i];
        high += turned * (turned >> 32 | 1);
    }
    sums[0] += low, sums[1] += high;
}

static void sum_part(const core_samples *s) {
    int64_t batch = 0, numbers[TOGETHER], part[TOGETHER];
    uint64_t z[TOGETHER];
    for (int64_t start = 0, n; start < s->n; start += n) {
        n = s->n - start < TOGETHER ? s->n - start : TOGETHER;
        const int64_t *at = s->at ? s->at + start : 0;
        int64_t first = s->first + start;
        if (s->blocks) numbers_of(s, s->rows + start, n, numbers);
        for (int64_t i = 0; i < n; i++) z[i] = s->key;
        mix_in(z, s->blocks ? numbers : s->rows + start, n);
        for (int64_t side = 0; s->begin && side < 2; side++) {
            const int64_t *values = side ? s->length : s->begin;
            for (int64_t i = 0; i < n; i++) part[i] = values[at ? at[i] : first + i];
            mix_in(z, part, n);
        }
        for (int64_t i = 0, end; i < n; i = end) { /* rows of one batch */
            while ((at ? at[i] : first + i) >= s->ends[batch]) batch++;
            end = at ? i + 1 : s->ends[batch] - first < n ? s->ends[batch] - first : n;
            while (at && end < n && at[end] < s->ends[batch]) end++;
            add_up(z + i, end - i, s->sums + 2 * batch);
        }
    }
}

void core_sum_samples(const core_samples *parts, int64_t count) {
    for (int64_t i = 0; i < count; i++) sum_part(parts + i);
}
