/* What becomes of the terms of ranks: NumPy's own inner loops combine them, so both runners give the same bytes. */
#include "native.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { NO_HALF, FLOAT16, BFLOAT16 };

/* -- NumPy's inner loops ------------------------------------------------------------------------------------------- */

/* The beginning of NumPy's PyUFuncObject, which its C interface has kept since version 1. */
typedef struct {
    PyObject_HEAD int nin, nout, nargs, identity;
    Loop *functions;
    void *const *data;
    int ntypes;
    int reserved;
    const char *name;
    const char *types;
} Ufunc;

/* Find the loop of a ufunc that takes two operands of a type to a result of the same type. */
int find_loop(PyObject *ufunc, int number, Step *found) {
    const Ufunc *head = (const Ufunc *)ufunc;
    for (int place = 0; place < head->ntypes; place++) {
        const char *types = head->types + 3 * place;
        if (types[0] == number && types[1] == number && types[2] == number) {
            found->loop = head->functions[place];
            found->data = head->data == NULL ? NULL : head->data[place];
            Py_XDECREF(found->owner);
            found->owner = Py_NewRef(ufunc);
            return found->loop != NULL;
        }
    }
    return 0;
}

/* -- halves -------------------------------------------------------------------------------------------------------- */

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float widened(uint16_t half) {
    const uint32_t exponent = 0x7c00u << 13, bits = (uint32_t)(half & 0x7fff) << 13;
    uint32_t made = bits + ((127u - 15) << 23);
    if ((bits & exponent) == exponent) made += (128u - 16) << 23; /* infinite or NaN */
    if ((bits & exponent) == 0) made = as_bits(as_float(made + (1u << 23)) - as_float(113u << 23));
    return as_float(made | (uint32_t)(half & 0x8000) << 16);
}

static inline uint16_t rounded(float value) {
    const uint32_t bits = as_bits(value), sign = bits & 0x80000000u, size = bits ^ sign;
    uint32_t made;
    if (size > (255u << 23)) /* NaN, of the same kind where it was a half */
        made = 0x7c00 | (((size >> 13) & 0x3ff) ? ((size >> 13) & 0x3ff) : 1);
    else if (size >= (143u << 23))
        made = 0x7c00;
    else if (size < (113u << 23))
        made = as_bits(as_float(size) + as_float(126u << 23)) - (126u << 23);
    else
        made = (size + ((uint32_t)(15 - 127) << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    return (uint16_t)(made | sign >> 16);
}

static void widen_plainly(const uint16_t *halves, float *out, Py_ssize_t count) {
    for (Py_ssize_t place = 0; place < count; place++) out[place] = widened(halves[place]);
}

static void round_plainly(const float *wide, uint16_t *out, Py_ssize_t count) {
    for (Py_ssize_t place = 0; place < count; place++) out[place] = rounded(wide[place]);
}

/* The same of bfloat16, in loops that compilers make wide: arrays lie apart. */
#define OF_BFLOAT16(HOW, WIDENING, ROUNDING)                                                                           \
    HOW static void WIDENING(const uint16_t *restrict halves, float *restrict out, Py_ssize_t count) {                 \
        for (Py_ssize_t place = 0; place < count; place++) out[place] = as_float((uint32_t)halves[place] << 16);       \
    }                                                                                                                  \
    HOW static void ROUNDING(const float *restrict wide, uint16_t *restrict out, Py_ssize_t count) {                   \
        for (Py_ssize_t place = 0; place < count; place++) {                                                           \
            const uint32_t bits = as_bits(wide[place]), is_nan = (bits & 0x7fffffffu) > 0x7f800000u;                   \
            const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, nan = (bits >> 16 & 0x8000) | 0x7fc0; \
            out[place] = (uint16_t)(is_nan ? nan : nearest);                                                           \
        }                                                                                                              \
    }
OF_BFLOAT16(, widen_brain_plainly, round_brain_plainly)

#if defined(__x86_64__)
OF_BFLOAT16(__attribute__((target("avx2"))), widen_brain_by_eight, round_brain_by_eight)
static int has_avx2(void) { return __builtin_cpu_supports("avx2"); }

/* These two make signalling NaN quiet, which NumPy does not: where there is any NaN they leave all to the plain ones.
 */
__attribute__((target("avx,f16c"))) static void widen_by_eight(const uint16_t *halves, float *out, Py_ssize_t count) {
    __m256 odd = _mm256_setzero_ps();
    Py_ssize_t place = 0;
    for (; place + 8 <= count; place += 8) {
        const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + place)));
        odd = _mm256_or_ps(odd, _mm256_cmp_ps(wide, wide, _CMP_UNORD_Q));
        _mm256_storeu_ps(out + place, wide);
    }
    if (_mm256_movemask_ps(odd)) place = 0;
    widen_plainly(halves + place, out + place, count - place);
}

__attribute__((target("avx,f16c"))) static void round_by_eight(const float *wide, uint16_t *out, Py_ssize_t count) {
    __m256 odd = _mm256_setzero_ps();
    Py_ssize_t place = 0;
    for (; place + 8 <= count; place += 8) {
        const __m256 values = _mm256_loadu_ps(wide + place);
        odd = _mm256_or_ps(odd, _mm256_cmp_ps(values, values, _CMP_UNORD_Q));
        _mm_storeu_si128((__m128i *)(out + place), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
    }
    if (_mm256_movemask_ps(odd)) place = 0;
    round_plainly(wide + place, out + place, count - place);
}

static int has_f16c(void) { return __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c"); }
#else
#define widen_by_eight widen_plainly
#define round_by_eight round_plainly
#define widen_brain_by_eight widen_brain_plainly
#define round_brain_by_eight round_brain_plainly
static int has_avx2(void) { return 0; }
static int has_f16c(void) { return 0; }
#endif

void widen(int half, const char *terms, float *out, Py_ssize_t count) {
    const uint16_t *halves = (const uint16_t *)terms;
    if (half == BFLOAT16)
        (has_avx2() ? widen_brain_by_eight : widen_brain_plainly)(halves, out, count);
    else
        (has_f16c() ? widen_by_eight : widen_plainly)(halves, out, count);
}

void round_all(int half, const float *wide, char *made, Py_ssize_t count) {
    uint16_t *out = (uint16_t *)made;
    if (half == BFLOAT16)
        (has_avx2() ? round_brain_by_eight : round_brain_plainly)(wide, out, count);
    else
        (has_f16c() ? round_by_eight : round_plainly)(wide, out, count);
}

/* -- sums of four -------------------------------------------------------------------------------------------------- */

/* Add four terms by the tree, without writing what is between; `out` may be one of them. Which NaN is kept of several is not said
 * of more than two ranks. */
#define SUM_OF_FOUR(TYPE, BYTES)                                                                                       \
    (const char *const *terms, char *out, Py_ssize_t nbytes) {                                                         \
        typedef TYPE Vector __attribute__((vector_size(BYTES), aligned(sizeof(TYPE)), may_alias));                     \
        typedef TYPE One __attribute__((may_alias));                                                                   \
        Py_ssize_t done = 0;                                                                                           \
        for (; done + (BYTES) <= nbytes; done += (BYTES))                                                              \
            *(Vector *)(out + done) = (*(const Vector *)(terms[0] + done) + *(const Vector *)(terms[1] + done)) +      \
                                      (*(const Vector *)(terms[2] + done) + *(const Vector *)(terms[3] + done));       \
        for (; done < nbytes; done += sizeof(TYPE))                                                                    \
            *(One *)(out + done) = (*(const One *)(terms[0] + done) + *(const One *)(terms[1] + done)) +               \
                                   (*(const One *)(terms[2] + done) + *(const One *)(terms[3] + done));                \
    }

static void four_floats_by_16 SUM_OF_FOUR(float, 16)
static void four_doubles_by_16 SUM_OF_FOUR(double, 16)
#if defined(__x86_64__)
__attribute__((target("avx2"))) static void four_floats_by_32 SUM_OF_FOUR(float, 32)
__attribute__((target("avx2"))) static void four_doubles_by_32 SUM_OF_FOUR(double, 32)
#else
#define four_floats_by_32 four_floats_by_16
#define four_doubles_by_32 four_doubles_by_16
#endif

/* Find what adds four terms at once, where NumPy's own addition combines them. */
static void find_four(Arithmetic *how, PyObject *ufunc, Py_ssize_t wide, int number) {
    enum { FLOAT = 11, DOUBLE = 12 }; /* NumPy's numbers */
    if (how->half) return; /* terms are not what is added */
    PyObject *numpy = PyImport_ImportModule("numpy"), *add = numpy == NULL ? NULL : PyObject_GetAttrString(numpy, "add");
    Py_XDECREF(numpy);
    Py_XDECREF(add); /* the module keeps it */
    if (add == NULL) PyErr_Clear();
    if (add != ufunc) return;
    if (number == FLOAT && wide == sizeof(float)) how->four = has_avx2() ? four_floats_by_32 : four_floats_by_16;
    if (number == DOUBLE && wide == sizeof(double)) how->four = has_avx2() ? four_doubles_by_32 : four_doubles_by_16;
}

/* -- combining ----------------------------------------------------------------------------------------------------- */

/* Combine terms [low, high) of a block by the tree over ranks: T(low, high) = T(low, middle) + T(middle, high).
 *
 * Returns where the combination is: `out`, or the only term where it lies. */
static const char *fold_tree(
    const Arithmetic *how, const char *const *terms, int low, int high, char *out, char *scratch, intptr_t count
) {
    const Py_ssize_t wide = how->half ? (Py_ssize_t)sizeof(float) : how->width;
    if (high - low == 1) {
        if (!how->half) return terms[low];
        widen(how->half, terms[low], (float *)out, count);
        return out;
    }
    if (high - low == 4 && how->four != NULL) {
        how->four(terms + low, out, count * wide);
        return out;
    }
    int half = 1;
    while (2 * half < high - low) half *= 2;
    const char *left = fold_tree(how, terms, low, low + half, out, scratch, count);
    const char *right = fold_tree(how, terms, low + half, high, scratch, scratch + BLOCK, count);
    combine(&how->fold, left, right, wide, out, count, wide);
    return out;
}

/* Combine terms, in the order of ranks, into `out`, which may be one of them. */
void fold_terms(const Arithmetic *how, const char *const *given, int count, char *out, Py_ssize_t nbytes) {
    _Alignas(64) char scratch[(LEVELS + 1) * BLOCK];
    char *const room = scratch + LEVELS * BLOCK;
    const Py_ssize_t wide = how->half ? (Py_ssize_t)sizeof(float) : how->width;
    if (count == 2 && !how->half && how->divide.loop == NULL) {
        combine(&how->fold, given[0], given[1], wide, out, nbytes / wide, wide);
        return;
    }
    int half = 1;
    while (2 * half < count) half *= 2;
    const Py_ssize_t step = BLOCK / wide * how->width;
    const char *terms[RANKS_MAX];
    for (Py_ssize_t start = 0; start < nbytes; start += step) {
        const Py_ssize_t stop = start + step < nbytes ? start + step : nbytes;
        const intptr_t elements = (stop - start) / how->width;
        for (int term = 0; term < count; term++) terms[term] = given[term] + start;
        char *made = how->half ? room : out + start; /* written when all terms have been read */
        if (count == 4 && how->four != NULL) {
            how->four(terms, made, elements * wide);
        } else {
            const char *left = fold_tree(how, terms, 0, count > 1 ? half : 1, room, scratch, elements);
            if (count > 1) {
                const char *right = fold_tree(how, terms, half, count, scratch, scratch + BLOCK, elements);
                combine(&how->fold, left, right, wide, made, elements, wide);
            } else if (left != made) {
                memmove(made, left, elements * wide);
            }
        }
        if (how->divide.loop != NULL) combine(&how->divide, made, how->divisor, 0, made, elements, wide);
        if (how->half) round_all(how->half, (const float *)made, out + start, elements);
    }
}

int number_of(PyObject *dtype) {
    PyObject *number = PyObject_GetAttrString(dtype, "num");
    const long found = number == NULL ? -1 : PyLong_AsLong(number);
    Py_XDECREF(number);
    return (int)found;
}

/* Find how arrays of a dtype are combined; 0 where NumPy has no loop for it. `dtype` may be None with halves: float32.
 */
int has_arithmetic(
    Arithmetic *how, PyObject *dtype, PyObject *fold, PyObject *divide, const char *divisor, Py_ssize_t divisor_bytes
) {
    const int number = number_of(dtype);
    const Py_ssize_t wide = how->half ? (Py_ssize_t)sizeof(float) : how->width;
    if (number < 0 || wide < 1 || BLOCK % wide != 0 || !find_loop(fold, number, &how->fold)) return 0;
    find_four(how, fold, wide, number);
    if (divide == Py_None) return 1;
    if (divisor_bytes != wide || divisor_bytes > (Py_ssize_t)sizeof how->divisor ||
        !find_loop(divide, number, &how->divide))
        return 0;
    memcpy(how->divisor, divisor, divisor_bytes);
    return 1;
}
