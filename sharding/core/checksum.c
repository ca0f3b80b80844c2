/* CRC-32C (Castagnoli) of many spans in one call, by the processor's instruction where it has one, else by Intel's
   slicing-by-8; and the records of TFRecord files. See core.h. */
#include "core.h"
#include "words.h"

#if defined(__x86_64__)
#include <cpuid.h>
static int has_instruction(void) {
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c >> 20 & 1; /* SSE 4.2 */
}
static inline uint32_t added_word(uint32_t crc, uint64_t word) {
    uint64_t sum = crc;
    __asm__("crc32q %1, %0" : "+r"(sum) : "r"(word));
    return (uint32_t)sum;
}
static inline uint32_t added_byte(uint32_t crc, uint8_t byte) {
    __asm__("crc32b %1, %0" : "+r"(crc) : "r"(byte));
    return crc;
}
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
static int has_instruction(void) { return getauxval(AT_HWCAP) >> 7 & 1; } /* HWCAP_CRC32 */
static inline uint32_t added_word(uint32_t crc, uint64_t word) {
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    return crc;
}
static inline uint32_t added_byte(uint32_t crc, uint8_t byte) {
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"((uint32_t)byte));
    return crc;
}
#else
static int has_instruction(void) { return 0; }
static inline uint32_t added_word(uint32_t crc, uint64_t word) { return crc + (uint32_t)word; } /* not called */
static inline uint32_t added_byte(uint32_t crc, uint8_t byte) { return crc + byte; }
#endif

typedef uint32_t tables[8][256];
#define AT_ONCE 4 /* spans: an instruction takes three cycles, and one can begin in each */
#define INLINE static inline __attribute__((always_inline))

/* Fill tables, or give null: then the instruction is there, which is asked for once, as that may take microseconds. */
static const uint32_t (*filled(tables t, int64_t anyway))[256] {
    static int known; /* 1: there, 2: not */
    int has = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!has) __atomic_store_n(&known, has = has_instruction() ? 1 : 2, __ATOMIC_RELAXED);
    if (has == 1 && !anyway) return 0;
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0x82F63B78u & -(crc & 1));
        t[0][byte] = crc;
    }
    for (int more = 1; more < 8; more++)
        for (int byte = 0; byte < 256; byte++)
            t[more][byte] = t[more - 1][byte] >> 8 ^ t[0][t[more - 1][byte] & 0xFF];
    return (const uint32_t(*)[256])t;
}

/* Null tables: by the instruction. */
INLINE uint32_t with_word(const uint32_t (*t)[256], uint32_t crc, uint64_t word) {
    if (!t) return added_word(crc, word);
    word ^= crc;
    crc = 0;
    for (int i = 0; i < 8; i++) crc ^= t[7 - i][word >> 8 * i & 0xFF];
    return crc;
}

INLINE uint32_t with_byte(const uint32_t (*t)[256], uint32_t crc, uint8_t byte) {
    return t ? crc >> 8 ^ t[0][(crc ^ byte) & 0xFF] : added_byte(crc, byte);
}

/* Checksums of `AT_ONCE` spans, of which `n` are told. */
INLINE void sums_of(const uint32_t (*t)[256], const uint8_t *data, const int64_t *starts, const int64_t *sizes, int64_t n,
                    uint32_t *out) {
    uint32_t crc[AT_ONCE] = {~0u, ~0u, ~0u, ~0u};
    int64_t common = n == AT_ONCE ? sizes[0] : 0;
    for (int64_t k = 1; k < n; k++) common = sizes[k] < common ? sizes[k] : common;
    common &= ~(int64_t)7;
    for (int64_t at = 0; at < common; at += 8)
        for (int k = 0; k < AT_ONCE; k++) crc[k] = with_word(t, crc[k], word_at(data + starts[k] + at));
    for (int64_t k = 0; k < n; k++) {
        int64_t at = common;
        for (; at + 8 <= sizes[k]; at += 8) crc[k] = with_word(t, crc[k], word_at(data + starts[k] + at));
        for (; at < sizes[k]; at++) crc[k] = with_byte(t, crc[k], data[starts[k] + at]);
        out[k] = ~crc[k];
    }
}

int64_t core_crc32c(const uint8_t *data, int64_t nbytes, const int64_t *starts, const int64_t *sizes, int64_t n,
                    uint32_t *out, int64_t by_tables) {
    for (int64_t i = 0; i < n; i++)
        if (starts[i] < 0 || sizes[i] < 0 || starts[i] > nbytes || sizes[i] > nbytes - starts[i]) return CORE_CUT;
    tables room;
    const uint32_t(*t)[256] = filled(room, by_tables);
    for (int64_t i = 0; i < n; i += AT_ONCE) {
        int64_t here = n - i < AT_ONCE ? n - i : AT_ONCE;
        if (t) sums_of(t, data, starts + i, sizes + i, here, out + i);
        else sums_of(0, data, starts + i, sizes + i, here, out + i);
    }
    return 0;
}

/* ---- TFRecord: length u8 | masked checksum of it u4 | record | masked checksum of the record u4 ----------------- */

#define HEADER 12
#define AROUND 16

static inline uint32_t masked(uint32_t crc) { return (crc >> 15 | crc << 17) + 0xA282EAD8u; }

int64_t core_tfrecords(const uint8_t *data, int64_t nbytes, int64_t *starts, int64_t *sizes, int64_t most) {
    tables room;
    const uint32_t(*t)[256] = filled(room, 0);
    int64_t found = 0;
    for (int64_t at = 0; found < most && nbytes - at >= AROUND; found++) {
        uint64_t size = word_at(data + at);
        uint32_t crc = masked(~with_word(t, ~0u, size));
        if (size > (uint64_t)(nbytes - at - AROUND) || crc != (uint32_t)word_at(data + at + 8)) break;
        starts[found] = at + HEADER;
        sizes[found] = (int64_t)size;
        at += AROUND + (int64_t)size;
    }
    return found;
}
