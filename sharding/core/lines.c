/* Lines of JSON objects: their number, and keys that an object has twice. See core.h. */
#include "core.h"
#include "words.h"

#define MOST_LEVELS 256

static uint64_t mixed(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
}

/* Never 0. */
static uint64_t hash_of(uint64_t object, const uint8_t *key, int64_t length) {
    uint64_t hash = mixed(object, (uint64_t)length), last = 0;
    for (; length > 8; length -= 8, key += 8) hash = mixed(hash, word_at(key));
    for (int64_t byte = 0; byte < length; byte++) last |= (uint64_t)key[byte] << 8 * byte;
    hash = mixed(hash, last);
    return hash ? hash : 1;
}

/* The quote that ends a text, whose first byte is at `at`; null: none does. */
static const uint8_t *end_of_text(const uint8_t *at, const uint8_t *end) {
    for (const uint8_t *quote = at; (quote = memchr(quote, '"', (size_t)(end - quote))); quote++) {
        const uint8_t *mark = quote;
        while (mark > at && mark[-1] == '\\') mark--;
        if ((quote - mark) % 2 == 0) return quote;
    }
    return 0;
}

int64_t core_json_lines(const uint8_t *text, int64_t nbytes, uint64_t *keys, int64_t slots, int64_t found[2]) {
    static const uint8_t stops[256] = {['"'] = 1, ['{'] = 1, ['}'] = 1, ['\n'] = 1};
    const uint8_t *at = text, *end = text + nbytes, *line = text;
    int64_t levels = 0, lines = 0, objects = 0, live = 0, answer = CORE_LINES_READ, first[MOST_LEVELS];
    uint64_t numbers[MOST_LEVELS], number = 0, last = (uint64_t)slots - 1, *taken = keys + slots;
    while (answer == CORE_LINES_READ) {
        while (at < end && !stops[*at]) at++;
        if (at == end || *at == '\n') {
            if (levels || objects > 1) answer = CORE_LINES_ODD;
            else lines += objects, objects = 0, line = at + (at < end);
            if (at == end) break;
        } else if (*at == '{') {
            objects += !levels;
            if (levels == MOST_LEVELS) answer = CORE_LINE_KEYS;
            else numbers[levels] = ++number, first[levels++] = live;
        } else if (*at == '}') {
            if (!levels--) answer = CORE_LINES_ODD, levels = 0;
            else while (live > first[levels]) keys[taken[--live]] = 0;
        } else {
            const uint8_t *key = at + 1, *quote = end_of_text(key, end), *next = quote ? quote + 1 : end;
            while (next < end && (*next == ' ' || *next == '\t' || *next == '\r')) next++;
            if (!quote) answer = CORE_LINES_ODD;
            else at = quote;
            if (slots && levels && next < end && *next == ':') {
                uint64_t hash = hash_of(numbers[levels - 1], key, quote - key), slot = hash & last;
                while (keys[slot] && keys[slot] != hash) slot = (slot + 1) & last; /* half of them are 0 */
                if (keys[slot] || 2 * live >= slots) answer = CORE_LINE_KEYS;
                else keys[slot] = hash, taken[live++] = slot; /* slots go in the reverse order */
            }
        }
        at++;
    }
    while (live) keys[taken[--live]] = 0;
    found[0] = lines, found[1] = line - text;
    return answer;
}
