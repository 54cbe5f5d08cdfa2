/* Arithmetic of reductions: NumPy's inner loops combine the terms, so C and Python give the same
 * bytes. One exception: which of two NaN with different bits a loop keeps depends on the number and
 * position of its elements, and lists of long arrays are cut differently. */
#include "native.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* -- NumPy's inner loops ----------------------------------------------------------------------- */

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

/* Find the loop of a ufunc for two operands and a result of one type. */
int find_loop(PyObject *ufunc, int number, Step *found) {
    const Ufunc *head = (const Ufunc *)ufunc;
    for (int place = 0; place < head->ntypes; place++) {
        const char *types = head->types + 3 * place;
        if (types[0] == number && types[1] == number && types[2] == number) {
            if (head->functions[place] == NULL) return 0;
            found->loop = head->functions[place];
            found->data = head->data == NULL ? NULL : head->data[place];
            Py_XDECREF(found->owner);
            found->owner = Py_NewRef(ufunc);
            return 1;
        }
    }
    return 0;
}

/* -- halves ------------------------------------------------------------------------------------ */

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

/* The same for bfloat16, in loops that compilers vectorize: the arrays do not overlap. */
#define OF_BFLOAT16(HOW, WIDENING, ROUNDING)                                                       \
    HOW static void WIDENING(const uint16_t *restrict halves, float *restrict out,                 \
                             Py_ssize_t count) {                                                   \
        for (Py_ssize_t place = 0; place < count; place++)                                         \
            out[place] = as_float((uint32_t)halves[place] << 16);                                  \
    }                                                                                              \
    HOW static void ROUNDING(const float *restrict wide, uint16_t *restrict out,                   \
                             Py_ssize_t count) {                                                   \
        for (Py_ssize_t place = 0; place < count; place++) {                                       \
            const uint32_t bits = as_bits(wide[place]),                                            \
                           is_nan = (bits & 0x7fffffffu) > 0x7f800000u;                            \
            const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16,                   \
                           nan = (bits >> 16 & 0x8000) | 0x7fc0;                                   \
            out[place] = (uint16_t)(is_nan ? nan : nearest);                                       \
        }                                                                                          \
    }
OF_BFLOAT16(, widen_brain_plainly, round_brain_plainly)

#if defined(__x86_64__)
OF_BFLOAT16(__attribute__((target("avx2"))), widen_brain_by_eight, round_brain_by_eight)
static int has_avx2(void) { return __builtin_cpu_supports("avx2"); }

/* These two make signalling NaN quiet, which NumPy does not. If there is any NaN, they leave all
 * elements to the plain functions. */
__attribute__((target("avx,f16c"))) static void widen_by_eight(const uint16_t *halves, float *out,
                                                               Py_ssize_t count) {
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

__attribute__((target("avx,f16c"))) static void round_by_eight(const float *wide, uint16_t *out,
                                                               Py_ssize_t count) {
    __m256 odd = _mm256_setzero_ps();
    Py_ssize_t place = 0;
    for (; place + 8 <= count; place += 8) {
        const __m256 values = _mm256_loadu_ps(wide + place);
        odd = _mm256_or_ps(odd, _mm256_cmp_ps(values, values, _CMP_UNORD_Q));
        _mm_storeu_si128((__m128i *)(out + place),
                         _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
    }
    if (_mm256_movemask_ps(odd)) place = 0;
    round_plainly(wide + place, out + place, count - place);
}

static int has_f16c(void) {
    return __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
}
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

static void round_all(int half, const float *wide, char *made, Py_ssize_t count) {
    uint16_t *out = (uint16_t *)made;
    if (half == BFLOAT16)
        (has_avx2() ? round_brain_by_eight : round_brain_plainly)(wide, out, count);
    else
        (has_f16c() ? round_by_eight : round_plainly)(wide, out, count);
}

/* -- sums of four ------------------------------------------------------------------------------ */

/* Add four terms by the tree without storing partial sums; `out` may be one of them. Return the
 * bytes that are done. It stops before a NaN: compilers may swap operands, and of two NaN the first
 * one must be kept. */
#define SUM_OF_FOUR(TYPE, BYTES)                                                                   \
    (const char *const *terms, char *out, Py_ssize_t nbytes) {                                     \
        typedef TYPE Vector __attribute__((vector_size(BYTES), aligned(sizeof(TYPE)), may_alias)); \
        typedef TYPE One __attribute__((may_alias));                                               \
        typedef long long Lanes __attribute__((vector_size(BYTES)));                               \
        enum { AT_ONCE = 4 };                                                                      \
        Py_ssize_t done = 0;                                                                       \
        for (; done + AT_ONCE * (BYTES) <= nbytes; done += AT_ONCE * (BYTES)) {                    \
            Vector made[AT_ONCE];                                                                  \
            Lanes odd = {0};                                                                       \
            long long any = 0;                                                                     \
            for (int which = 0; which < AT_ONCE; which++) {                                        \
                const Py_ssize_t at = done + which * (BYTES);                                      \
                made[which] =                                                                      \
                    (*(const Vector *)(terms[0] + at) + *(const Vector *)(terms[1] + at)) +        \
                    (*(const Vector *)(terms[2] + at) + *(const Vector *)(terms[3] + at));         \
                odd |= (Lanes)(made[which] != made[which]);                                        \
            }                                                                                      \
            for (size_t lane = 0; lane < (BYTES) / sizeof any; lane++) any |= odd[lane];           \
            if (any) return done;                                                                  \
            for (int which = 0; which < AT_ONCE; which++)                                          \
                *(Vector *)(out + done + which * (BYTES)) = made[which];                           \
        }                                                                                          \
        for (; done < nbytes; done += sizeof(TYPE)) {                                              \
            const One made = (*(const One *)(terms[0] + done) + *(const One *)(terms[1] + done)) + \
                             (*(const One *)(terms[2] + done) + *(const One *)(terms[3] + done));  \
            if (made != made) return done;                                                         \
            *(One *)(out + done) = made;                                                           \
        }                                                                                          \
        return done;                                                                               \
    }

static Py_ssize_t four_floats_by_16 SUM_OF_FOUR(float, 16) static Py_ssize_t four_doubles_by_16
    SUM_OF_FOUR(double, 16)
#if defined(__x86_64__)
        __attribute__((target("avx2"))) static Py_ssize_t four_floats_by_32 SUM_OF_FOUR(float, 32)
            __attribute__((target("avx2"))) static Py_ssize_t four_doubles_by_32
    SUM_OF_FOUR(double, 32)
#else
#define four_floats_by_32 four_floats_by_16
#define four_doubles_by_32 four_doubles_by_16
#endif

    /* Find what adds four terms at once, where NumPy's own addition combines them. */
    static void find_four(Arithmetic *how, PyObject *ufunc, int number) {
    enum { FLOAT = 11, DOUBLE = 12 }; /* NumPy's numbers */
    if (ufunc != numpy_add) return;
    if (number == FLOAT && how->width == sizeof(float))
        how->four = has_avx2() ? four_floats_by_32 : four_floats_by_16;
    if (number == DOUBLE && how->width == sizeof(double))
        how->four = has_avx2() ? four_doubles_by_32 : four_doubles_by_16;
}

/* -- sums of two halves ------------------------------------------------------------------------ */

#if defined(__x86_64__)
static inline __attribute__((target("avx2,f16c"))) __m256 load_half(const char *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}

static inline __attribute__((target("avx2,f16c"))) void store_half(char *to, __m256 made) {
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(made, _MM_FROUND_TO_NEAREST_INT));
}

static inline __attribute__((target("avx2,f16c"))) __m256 load_brain(const char *from) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16));
}

static inline __attribute__((target("avx2,f16c"))) void store_brain(char *to, __m256 made) {
    const __m256i bits = _mm256_castps_si256(made),
                  odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_srli_epi32(
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(nearest, nearest), 0x08);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(packed));
}

/* Add two terms of halves as float32, divide (unless by 0) and round, without storing partial
 * results; `out` may be one of them. Return the elements that are done. It stops before a NaN,
 * which only the plain loops keep as NumPy does. */
#define SUM_OF_TWO(LOAD, STORE)                                                                    \
    (const char *const *terms, char *out, Py_ssize_t count, float divisor) {                       \
        const __m256 by = _mm256_set1_ps(divisor);                                                 \
        Py_ssize_t done = 0;                                                                       \
        for (; done + 8 <= count; done += 8) {                                                     \
            __m256 made = _mm256_add_ps(LOAD(terms[0] + 2 * done), LOAD(terms[1] + 2 * done));     \
            if (divisor != 0) made = _mm256_div_ps(made, by);                                      \
            if (_mm256_movemask_ps(_mm256_cmp_ps(made, made, _CMP_UNORD_Q))) break;                \
            STORE(out + 2 * done, made);                                                           \
        }                                                                                          \
        return done;                                                                               \
    }

__attribute__((target("avx2,f16c"))) static Py_ssize_t two_halves SUM_OF_TWO(load_half, store_half)
    __attribute__((target("avx2,f16c"))) static Py_ssize_t two_brains
    SUM_OF_TWO(load_brain, store_brain)

    /* Find what adds two terms of halves at once, where NumPy's own addition combines them. */
    static void find_pair(Arithmetic *how, PyObject *ufunc) {
    if (ufunc == numpy_add && how->half && how->width == sizeof(uint16_t) && has_avx2() &&
        has_f16c())
        how->pair = how->half == BFLOAT16 ? two_brains : two_halves;
}
#else
static void find_pair(Arithmetic *how, PyObject *ufunc) { (void)how, (void)ufunc; }
#endif

/* -- combining --------------------------------------------------------------------------------- */

/* Return whether the terms themselves are halves. */
static int widens(const Arithmetic *how) { return how->half && how->width == sizeof(uint16_t); }

/* Return the bytes of an element while it is combined. */
static Py_ssize_t wide_of(const Arithmetic *how) {
    return how->half ? (Py_ssize_t)sizeof(float) : how->width;
}

/* Add four terms of a block; `out` may be one of them. `room` and `scratch` are blocks of scratch
 * memory; `room` may be `out`. */
static void add_four(const Arithmetic *how, const char *const *terms, char *out, char *room,
                     char *scratch, intptr_t count) {
    const Py_ssize_t wide = wide_of(how), done = how->four(terms, out, count * wide);
    const intptr_t left = count - done / wide;
    if (left == 0) return;
    combine(&how->fold, terms[0] + done, terms[1] + done, wide, room + done, left, wide);
    combine(&how->fold, terms[2] + done, terms[3] + done, wide, scratch + done, left, wide);
    combine(&how->fold, room + done, scratch + done, wide, out + done, left, wide);
}

/* Combine terms [low, high) of a block by the tree over ranks: T(low, high) = T(low, middle) +
 * T(middle, high).
 *
 * `stride` is the distance of two elements. Return the combination: `out`, or the only term itself.
 */
static const char *fold_tree(const Arithmetic *how, const char *const *terms, int low, int high,
                             char *out, char *scratch, intptr_t count, Py_ssize_t stride) {
    if (high - low == 1) {
        if (!widens(how)) return terms[low];
        widen(how->half, terms[low], (float *)out, count);
        return out;
    }
    if (high - low == 4 && how->four != NULL && stride) {
        add_four(how, terms + low, out, out, scratch, count);
        return out;
    }
    int half = 1;
    while (2 * half < high - low) half *= 2;
    const char *left = fold_tree(how, terms, low, low + half, out, scratch, count, stride);
    const char *right =
        fold_tree(how, terms, low + half, high, scratch, scratch + BLOCK, count, stride);
    combine(&how->fold, left, right, stride, out, count, stride);
    return out;
}

/* The same for all terms of a block. `made` may be one of them: it is written after all have been
 * read. `scratch` has LEVELS + 1 blocks. */
static void fold_block(const Arithmetic *how, const char *const *terms, int count, char *made,
                       char *scratch, intptr_t elements, Py_ssize_t stride) {
    const Py_ssize_t wide = wide_of(how);
    char *const room = scratch + LEVELS * BLOCK;
    if (stride == 0) {
        memmove(made, fold_tree(how, terms, 0, count, room, scratch, elements, stride),
                (size_t)wide);
    } else if (count == 4 && how->four != NULL) {
        add_four(how, terms, made, room, scratch, elements);
    } else if (count == 1) {
        const char *only = fold_tree(how, terms, 0, 1, room, scratch, elements, stride);
        copy_in(made, only, (size_t)(elements * wide));
    } else {
        int half = 1;
        while (2 * half < count) half *= 2;
        const char *left = fold_tree(how, terms, 0, half, room, scratch, elements, stride);
        const char *right =
            fold_tree(how, terms, half, count, scratch, scratch + BLOCK, elements, stride);
        combine(&how->fold, left, right, wide, made, elements, wide);
    }
    if (how->divide.loop != NULL)
        combine(&how->divide, made, how->divisor, 0, made, elements, wide);
}

/* Combine terms in rank order into `out`, which may be one of them. With `apply`, `out` becomes
 * apply(out, combination). */
void fold_terms(const Arithmetic *how, const Step *apply, const char *const *given, int count,
                char *out, Py_ssize_t elements) {
    _Alignas(64) char scratch[(LEVELS + 1) * BLOCK],
        held[BLOCK]; /* held: what the result holds, where that are halves */
    char *const room = scratch + LEVELS * BLOCK;
    const Py_ssize_t wide = wide_of(how), step = BLOCK / wide,
                     width = how->half ? (Py_ssize_t)sizeof(uint16_t) : wide;
    /* As NumPy calls its loops, which keep another one of two NaNs then, and round products of
     * complex numbers otherwise. */
    const Py_ssize_t stride = elements == 1 && !how->is_complex ? 0 : wide;
    const int applies = apply != NULL && apply->loop != NULL;
    if (count == 2 && stride && !how->half && how->divide.loop == NULL && !applies) {
        combine(&how->fold, given[0], given[1], wide, out, elements, wide);
        return;
    }
    const char *terms[RANKS_MAX];
    Py_ssize_t begin = 0;
    if (count == 2 && stride && how->pair != NULL && !applies) {
        float divisor = 0;
        if (how->divide.loop != NULL) memcpy(&divisor, how->divisor, sizeof divisor);
        begin = how->pair(given, out, elements, divisor);
    }
    for (Py_ssize_t first = begin; first < elements; first += step) {
        const intptr_t some = elements - first < step ? elements - first : step;
        char *const part = out + first * width, *const made = how->half || applies ? room : part;
        for (int term = 0; term < count; term++) terms[term] = given[term] + first * how->width;
        fold_block(how, terms, count, made, scratch, some, stride);
        char *const target = how->half ? held : part;
        if (applies && how->half) widen(how->half, part, (float *)held, some);
        if (applies) combine(apply, target, made, stride, target, some, stride);
        if (how->half) round_all(how->half, (const float *)(applies ? held : made), part, some);
    }
}

/* Read an arithmetic, (width, dtype, half, fold, divide, divisor, apply): ufuncs or None, and the
 * dtype in which terms are combined. Return 0 if NumPy has no loop for it. */
int read_arithmetic(PyObject *given, Arithmetic *how, Step *apply) {
    PyObject *dtype, *fold, *divide, *applied;
    const char *divisor;
    Py_ssize_t divisor_bytes;
    if (!PyArg_ParseTuple(given, "nOiOOy#O", &how->width, &dtype, &how->half, &fold, &divide,
                          &divisor, &divisor_bytes, &applied))
        return 0;
    PyObject *found = PyObject_GetAttrString(dtype, "num");
    const int number = found == NULL ? -1 : (int)PyLong_AsLong(found);
    Py_XDECREF(found);
    if (number < 0 || how->width < 1 || how->half < NO_HALF || how->half > BFLOAT16) return 0;
    if (how->half && !widens(how) && how->width != sizeof(float)) return 0;
    if (applied != Py_None && !find_loop(applied, number, apply)) return 0;
    if (fold == Py_None) return divide == Py_None;
    const Py_ssize_t wide = wide_of(how);
    how->is_complex =
        number == 14 || number == 15; /* NumPy's numbers of complex64 and complex128 */
    if (BLOCK % wide != 0 || !find_loop(fold, number, &how->fold)) return 0;
    find_four(how, fold, number);
    find_pair(how, fold);
    if (divide == Py_None) return 1;
    if (divisor_bytes != wide || divisor_bytes > (Py_ssize_t)sizeof how->divisor ||
        !find_loop(divide, number, &how->divide))
        return 0;
    memcpy(how->divisor, divisor, divisor_bytes);
    return 1;
}
