/* CRC-32 of frames between hosts: the same as zlib's, and several times as fast. */
#include "native.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define POLYNOMIAL 0xEDB88320u /* of CRC-32, the lowest bit first */
#define FOLDED_LEAST 128       /* bytes from which folding is worth it */
#define WIDE_LEAST 1024        /* bytes from which wide registers are worth it */
#define ALONE_LEAST (64 << 10) /* bytes from which other threads may run meanwhile */

static uint32_t by_byte[256];
static int can_fold, can_fold_wide;

/* Prepare the table, and look at the processor. */
void prepare_checksum(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t left = byte;
        for (int bit = 0; bit < 8; bit++) left = left >> 1 ^ (left & 1 ? POLYNOMIAL : 0);
        by_byte[byte] = left;
    }
#if defined(__x86_64__)
    can_fold = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    can_fold_wide = can_fold && __builtin_cpu_supports("avx512f") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("vpclmulqdq");
#endif
}

static uint32_t checksum_bytes(uint32_t state, const uint8_t *data, size_t nbytes) {
    for (size_t each = 0; each < nbytes; each++)
        state = state >> 8 ^ by_byte[(state ^ data[each]) & 0xFF];
    return state;
}

#if defined(__x86_64__)
#define FOLDS __attribute__((target("pclmul,sse4.1")))
#define BLOCK sizeof(__m128i)

/* Return 16 bytes that have the same remainder as `block` has so many bits earlier.
 *
 * `factors` has x^(bits + 32) and x^(bits - 32) modulo the polynomial, the lowest bit first. */
FOLDS static inline __m128i fold(__m128i block, __m128i factors) {
    return _mm_xor_si128(_mm_clmulepi64_si128(block, factors, 0x00),
                         _mm_clmulepi64_si128(block, factors, 0x11));
}

FOLDS static uint32_t checksum_blocks(uint32_t state, const uint8_t *data, size_t nbytes) {
    const __m128i over_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4),
                  over_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0),
                  *from = (const __m128i *)data;
    __m128i sums[4];
    for (int each = 0; each < 4; each++) sums[each] = _mm_loadu_si128(from + each);
    sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128((int)state));
    size_t done = 4;
    for (; done + 4 <= nbytes / BLOCK; done += 4)
        for (int each = 0; each < 4; each++)
            sums[each] =
                _mm_xor_si128(fold(sums[each], over_512), _mm_loadu_si128(from + done + each));
    for (int each = 1; each < 4; each++)
        sums[each] = _mm_xor_si128(fold(sums[each - 1], over_128), sums[each]);
    uint8_t last[BLOCK];
    _mm_storeu_si128((__m128i *)last, sums[3]);
    state = checksum_bytes(0, last, BLOCK);
    return checksum_bytes(state, data + done * BLOCK, nbytes - done * BLOCK);
}

#define WIDE_FOLDS __attribute__((target("avx512f,avx512dq,vpclmulqdq,pclmul,sse4.1")))
#define WIDE sizeof(__m512i)
#define WIDE_SUMS 4

/* The same for four blocks side by side in each register. */
WIDE_FOLDS static uint32_t checksum_wide(uint32_t state, const uint8_t *data, size_t nbytes) {
    const __m512i over_2048 = _mm512_broadcast_i64x2(_mm_set_epi64x(0x1322d1430, 0x11542778a));
    const __m512i *from = (const __m512i *)data;
    __m512i sums[WIDE_SUMS];
    for (int each = 0; each < WIDE_SUMS; each++) sums[each] = _mm512_loadu_si512(from + each);
    sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
    size_t done = WIDE_SUMS;
    for (; done + WIDE_SUMS <= nbytes / WIDE; done += WIDE_SUMS)
        for (int each = 0; each < WIDE_SUMS; each++) {
            __m512i low = _mm512_clmulepi64_epi128(sums[each], over_2048, 0x00),
                    high = _mm512_clmulepi64_epi128(sums[each], over_2048, 0x11);
            sums[each] =
                _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(from + done + each), 0x96);
        }
    uint8_t last[WIDE_SUMS * WIDE];
    memcpy(last, sums, sizeof last);
    state = checksum_blocks(0, last, sizeof last);
    data += done * WIDE, nbytes -= done * WIDE;
    return nbytes < FOLDED_LEAST ? checksum_bytes(state, data, nbytes)
                                 : checksum_blocks(state, data, nbytes);
}
#endif

/* Return the checksum of bytes that follow others with the checksum `before`. */
static uint32_t checksum(uint32_t before, const uint8_t *data, size_t nbytes) {
#if defined(__x86_64__)
    if (can_fold_wide && nbytes >= WIDE_LEAST) return ~checksum_wide(~before, data, nbytes);
    if (can_fold && nbytes >= FOLDED_LEAST) return ~checksum_blocks(~before, data, nbytes);
#endif
    return ~checksum_bytes(~before, data, nbytes);
}

/* crc32(buffer, before=0): as zlib.crc32. */
PyObject *crc32_of(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count < 1 || count > 2) {
        PyErr_SetString(PyExc_TypeError, "crc32 takes a buffer, and the sum of what is before it");
        return NULL;
    }
    unsigned long sum = count > 1 ? PyLong_AsUnsignedLong(arguments[1]) : 0;
    if (sum == (unsigned long)-1 && PyErr_Occurred()) return NULL;
    Py_buffer view;
    if (PyObject_GetBuffer(arguments[0], &view, PyBUF_SIMPLE) < 0) return NULL;
    if (view.len < ALONE_LEAST) {
        sum = checksum((uint32_t)sum, view.buf, (size_t)view.len);
    } else {
        Py_BEGIN_ALLOW_THREADS
            sum = checksum((uint32_t)sum, view.buf, (size_t)view.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(sum);
}
