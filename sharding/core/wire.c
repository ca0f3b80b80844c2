/* Protobuf messages: features of Examples, packed numbers; and records of riegeli's chunks. See core.h and
   `sharding.formats.records.wire`. */
#include "core.h"
#include "variants.h"
#include "words.h"

enum { VARINT = 0, FIXED64 = 1, SPAN = 2, FIXED32 = 5 };
#define HEAD_BYTES 5 /* of a tag or a length, at most: messages end below 2 GiB */
#define NUMBER_BYTES 10
#define CHUNK_HEADER 40

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

typedef struct {
    int64_t number, wire, start, end; /* of the value; of a varint it begins with the first byte */
} field;

/* The field behind `found`, in a message that ends at `end`. */
static inline int64_t next_field(const uint8_t *data, int64_t end, field *found) {
    uint64_t tag, size;
    int64_t at = found->end, failed = number_at(data, &at, end, HEAD_BYTES, &tag);
    if (failed) return failed;
    found->start = at;
    found->number = (int64_t)(tag >> 3);
    found->wire = (int64_t)(tag & 7);
    switch (found->wire) {
    case VARINT: failed = number_at(data, &at, end, NUMBER_BYTES, &size); break;
    case FIXED64: at += 8; break;
    case FIXED32: at += 4; break;
    case SPAN:
        failed = number_at(data, &at, end, HEAD_BYTES, &size);
        found->start = at;
        at += (int64_t)size;
        break;
    default: return CORE_WIRE_TYPE;
    }
    found->end = at;
    return failed ? failed : at > end ? CORE_CUT : found->number ? 0 : CORE_NUMBER_0;
}

static inline void put(core_rows *rows, int64_t first, int64_t second, int64_t third) {
    if (rows->found < rows->most) {
        rows->out[rows->found] = first;
        rows->out[rows->most + rows->found] = second;
        rows->out[2 * rows->most + rows->found] = third;
    }
    rows->found++;
}

/* ---- tf.train.Example and SequenceExample --------------------------------------------------------------------- */

#define GUESSES 2048

/* Lists of values that one message says: their kinds are the numbers of its fields. */
static int64_t put_lists(core_examples *e, int64_t start, int64_t end, int64_t step) {
    int64_t failed;
    for (field list = {.end = start}; list.end < end;) {
        if ((failed = next_field(e->data, end, &list))) return failed;
        if (list.number > 3 || list.wire != SPAN) return CORE_NO_EXAMPLE;
        put(&e->lists, step, list.number, 0);
        int64_t alone = list.number == 1 ? SPAN : list.number == 2 ? FIXED32 : VARINT;
        for (field value = {.end = list.start}; value.end < list.end;) {
            if ((failed = next_field(e->data, list.end, &value))) return failed;
            if (value.number != 1 || (value.wire != SPAN && value.wire != alone)) return CORE_NO_EXAMPLE;
            put(&e->values, e->lists.found - 1, value.start, value.end);
        }
    }
    return 0;
}

static int is_name(const core_examples *e, int64_t number, const uint8_t *key, int64_t size) {
    const core_name *name = e->names + number;
    return name->nbytes == size && !memcmp(name->bytes, key, (size_t)size);
}

/* The number of a name, which is added if it is new; `most_names`, where there are too many. */
static int64_t named(core_examples *e, int64_t guess, const uint8_t *key, int64_t size) {
    if (guess < e->num_names && is_name(e, guess, key, size)) return guess;
    for (int64_t number = 0; number < e->num_names; number++)
        if (is_name(e, number, key, size)) return number;
    if (e->num_names < e->most_names) e->names[e->num_names++] = (core_name){key, size, e->wants_new};
    else return e->most_names;
    return e->num_names - 1;
}

int64_t core_parse(core_examples *e) {
    int16_t guesses[GUESSES] = {0}; /* records mostly have their features in the order of the record before */
    int64_t failed, has_too_many = 0;
    for (int64_t record = 0; record < e->num_records; record++) {
        int64_t end = e->ends[record], nth = 0;
        field top = {.end = e->starts[record]};
        if (top.end < end && (top.end < 0 || end > e->nbytes)) return CORE_CUT;
        while (top.end < end) {
            if ((failed = next_field(e->data, end, &top))) return failed;
            if (top.number > 2 || top.wire != SPAN) return CORE_NO_EXAMPLE;
            for (field entry = {.end = top.start}; entry.end < top.end; nth++) {
                if ((failed = next_field(e->data, top.end, &entry))) return failed;
                if (entry.number != 1 || entry.wire != SPAN) return CORE_NO_EXAMPLE;
                field parts[3] = {{0}}; /* key and value; what is given last counts */
                for (field part = {.end = entry.start}; part.end < entry.end;) {
                    if ((failed = next_field(e->data, entry.end, &part))) return failed;
                    if (part.number > 2 || part.wire != SPAN) return CORE_NO_EXAMPLE;
                    parts[part.number] = part;
                }
                const field *key = parts + 1, *value = parts + 2;
                int64_t guess = nth < GUESSES ? guesses[nth] : 0;
                int64_t name = named(e, guess, e->data + key->start, key->end - key->start);
                if (name == e->most_names) {
                    has_too_many = 1; /* said only where all is an Example */
                    continue;
                }
                if (nth < GUESSES) guesses[nth] = (int16_t)name;
                if (!e->names[name].wanted) continue;
                put(&e->features, record, name, top.number == 2);
                int64_t feature = e->features.found - 1;
                if (top.number == 1) {
                    put(&e->steps, feature, 0, 0);
                    if ((failed = put_lists(e, value->start, value->end, e->steps.found - 1))) return failed;
                    continue;
                }
                for (field step = {.end = value->start}; step.end < value->end;) {
                    if ((failed = next_field(e->data, value->end, &step))) return failed;
                    if (step.number != 1 || step.wire != SPAN) return CORE_NO_EXAMPLE;
                    put(&e->steps, feature, 0, 0);
                    if ((failed = put_lists(e, step.start, step.end, e->steps.found - 1))) return failed;
                }
            }
        }
    }
    return has_too_many ? CORE_TOO_MANY_NAMES : 0;
}

/* ---- packed numbers --------------------------------------------------------------------------------------------- */

VARIANTS static int64_t num_below_128(const uint8_t *data, int64_t nbytes) {
    int64_t count = 0;
    for (int64_t i = 0; i < nbytes; i++) count += data[i] < 0x80;
    return count;
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
VARIANTS static int64_t numbers_in(const uint8_t *data, int64_t nbytes, int64_t start, int64_t end,
                                   int64_t *restrict out, int64_t most) {
    int64_t found = 0, first = start;
    for (int64_t at = start; at < end; at += 64) {
        int64_t here = end - at < 64 ? end - at : 64;
        uint64_t last = 0, all = ~(uint64_t)0 >> (64 - here);
        if (at + 64 <= nbytes)
            last = last_among(data + at) & all;
        else
            for (int64_t i = 0; i < here; i++) last |= (uint64_t)(data[at + i] < 0x80) << i;
        if (__builtin_popcountll(last) > most - found) return CORE_CUT; /* the bytes are others than were counted */
        uint64_t goes_on = ~last & all;
        if (last && at + __builtin_ctzll(last) - first < 4 && at + 72 <= nbytes &&
            !(goes_on & goes_on >> 1 & goes_on >> 2 & goes_on >> 3)) { /* none takes more than four bytes */
            for (; last; last &= last - 1) {
                int64_t past = at + __builtin_ctzll(last) + 1;
                uint32_t number = (uint32_t)word_at(data + first) & (0x7F7F7F7Fu >> (32 - 8 * (past - first)));
                number = (number & 0x007F007Fu) | (number & 0x7F007F00u) >> 1; /* the gaps are closed */
                out[found++] = (number & 0x00003FFFu) | (number & 0x3FFF0000u) >> 2;
                first = past;
            }
            continue;
        }
        for (; last; last &= last - 1) {
            int64_t past = at + __builtin_ctzll(last) + 1;
            uint64_t number = 0;
            if (past - first > NUMBER_BYTES) return CORE_LONG;
            for (int shift = 0; first < past; shift += 7) number |= (uint64_t)(data[first++] & 0x7F) << shift;
            out[found++] = (int64_t)number;
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

/* ---- chunks of riegeli ------------------------------------------------------------------------------------------ */

int64_t core_records(const uint8_t *data, int64_t nbytes, const int64_t *at, const int64_t *counts, int64_t n,
                     int64_t *starts, int64_t *sizes) {
    for (int64_t i = 0, record = 0; i < n; i++) {
        int64_t body = at[i] + CHUNK_HEADER, first = body + 1;
        if (at[i] < 0 || nbytes - CHUNK_HEADER < at[i]) return -1;
        uint64_t size = word_at(data + at[i] + 8), kind = word_at(data + at[i] + 24), left, listed;
        if (kind != ((uint64_t)counts[i] << 8 | 'r') || size < 2 || size > (uint64_t)(nbytes - body) || data[body])
            return -1;
        int64_t end = body + (int64_t)size;
        if (number_at(data, &first, end, NUMBER_BYTES, &listed) || listed > (uint64_t)(end - first)) return -1;
        int64_t value = first + (int64_t)listed, last = value;
        left = (uint64_t)(end - value);
        if (left != word_at(data + at[i] + 32)) return -1;
        for (int64_t k = 0; k < counts[i]; k++, record++) {
            uint64_t own;
            if (number_at(data, &first, last, NUMBER_BYTES, &own) || own > left) return -1;
            starts[record] = value;
            sizes[record] = (int64_t)own;
            value += (int64_t)own;
            left -= own;
        }
        if (left || first != last) return -1;
    }
    return 0;
}
