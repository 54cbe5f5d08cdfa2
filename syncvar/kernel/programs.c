/* The C runner of programs: it does what syncvar/execution/interpreter.py does in Python, instruction by instruction.
 *
 * A Program has been looked at once: what it reads and writes lies within its memories. A Run is one call of it; it
 * goes on until the others have to come first, and says then what they have to reach. Meanwhile others may have
 * Python's lock.
 */
#include "native.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <errno.h>
#if defined(__linux__)
#include <sys/uio.h>
#endif

#define ADDRESS ((Py_ssize_t)1 << 60)  /* in a memory's offset: an address in another process */
#define GONE (-((long long)1 << 40))   /* as `NEVER` in phases.py: that process is no more */
#define UNREAD (-((long long)1 << 41)) /* as in __init__.py: its memory could not be read */
#define PATIENCE_NS 1000000            /* so long others are waited for without Python's lock, before Python waits */
#define PATIENCE_LOCKED_NS 20000       /* and with it */

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

#if defined(__x86_64__)
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
static int has_f16c(void) { return 0; }
#endif

static void widen(int half, const char *terms, float *out, Py_ssize_t count) {
    const uint16_t *halves = (const uint16_t *)terms;
    if (half == BFLOAT16)
        for (Py_ssize_t place = 0; place < count; place++) out[place] = as_float((uint32_t)halves[place] << 16);
    else
        (has_f16c() ? widen_by_eight : widen_plainly)(halves, out, count);
}

static void round_all(int half, const float *wide, char *made, Py_ssize_t count) {
    uint16_t *out = (uint16_t *)made;
    if (half != BFLOAT16) {
        (has_f16c() ? round_by_eight : round_plainly)(wide, out, count);
        return;
    }
    for (Py_ssize_t place = 0; place < count; place++) {
        const uint32_t bits = as_bits(wide[place]), is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, nan = (bits >> 16 & 0x8000) | 0x7fc0;
        out[place] = (uint16_t)(is_nan ? nan : nearest);
    }
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
        const char *left = fold_tree(how, terms, 0, count > 1 ? half : 1, room, scratch, elements);
        if (count > 1) {
            const char *right = fold_tree(how, terms, half, count, scratch, scratch + BLOCK, elements);
            combine(&how->fold, left, right, wide, made, elements, wide);
        } else if (left != made) {
            memmove(made, left, elements * wide);
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
    if (divide == Py_None) return 1;
    if (divisor_bytes != wide || divisor_bytes > (Py_ssize_t)sizeof how->divisor ||
        !find_loop(divide, number, &how->divide))
        return 0;
    memcpy(how->divisor, divisor, divisor_bytes);
    return 1;
}

PyTypeObject *program_type, *run_type;

/* -- programs ------------------------------------------------------------------------------------------------------ */

/* As in syncvar/execution/program.py. */
enum { COPY, STORE, FOLD, PUBLISH, AWAIT };
enum { SOURCE, TARGET, SCRATCH, SLOT, CELLS, MADE, LYING, GOAL };

static int is_known(const Program *self, int64_t memory, int64_t start, int64_t count) {
    if (memory < 0 || memory >= self->memories) return 0;
    const int64_t size = self->named[memory].nbytes / self->how.width;
    return start >= 0 && count >= 0 && count <= size && start <= size - count;
}

/* Look whether all instructions are whole, and use their memories within their sizes. */
static int is_sound(const Program *self) {
    Py_ssize_t place = 0;
    int begins = self->opening == 0; /* the steps begin where an instruction does, after nothing but copies */
    while (place < self->length) {
        const int64_t *step = self->code + place;
        const Py_ssize_t left = self->length - place;
        if (place == self->opening) begins = 1;
        if (!begins && *step != COPY) return 0;
        if (*step == COPY || *step == STORE) {
            if (left < 6 || !is_known(self, step[1], step[2], step[5]) || !is_known(self, step[3], step[4], step[5]))
                return 0;
            if (self->named[step[3]].kind == LYING) return 0; /* it is read only */
            place += 6;
        } else if (*step == FOLD) {
            if (left < 5 || step[4] < 1 || step[4] > RANKS_MAX || left < 5 + 2 * step[4] || self->how.fold.loop == NULL)
                return 0;
            if (!is_known(self, step[1], step[2], step[3]) || self->named[step[1]].kind == LYING) return 0;
            for (int64_t term = 0; term < step[4]; term++)
                if (!is_known(self, step[5 + 2 * term], step[6 + 2 * term], step[3])) return 0;
            place += 5 + 2 * step[4];
        } else if (*step == PUBLISH) {
            place += 1;
        } else if (*step == AWAIT && left >= 2 && step[1] >= 0) {
            place += 2;
        } else {
            return 0;
        }
    }
    return begins || self->opening == self->length;
}

static PyObject **program_references(PyObject *object, int place) {
    Program *self = (Program *)object;
    PyObject **all[] = {&self->how.fold.owner, &self->how.divide.owner, &self->apply.owner};
    return place < (int)(sizeof all / sizeof all[0]) ? all[place] : NULL;
}

static int program_traverse(PyObject *object, visitproc visit, void *arg) {
    return visit_all(object, program_references, visit, arg);
}

static int program_clear(PyObject *object) {
    clear_all(object, program_references);
    return 0;
}

static void program_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    program_clear(object);
    PyMem_Free(((Program *)object)->code);
    PyMem_Free(((Program *)object)->named);
    release_object(object);
}

/* Program(code, opening, names, sizes, width, dtype, half, fold, divide, divisor, apply): the code as 64-bit numbers,
 * of which so many come before phase 0 is published; kind, rank and place of each memory, and its elements; the dtype
 * in which terms are combined.
 */
static PyObject *program_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    const char *code, *divisor;
    Py_ssize_t code_bytes, divisor_bytes, opening, width, *numbers = NULL;
    PyObject *named, *given, *dtype, *fold, *divide, *apply;
    int half;
    if (keywords != NULL || !PyArg_ParseTuple(
                                arguments, "y#nOOnOiOOy#O", &code, &code_bytes, &opening, &named, &given, &width,
                                &dtype, &half, &fold, &divide, &divisor, &divisor_bytes, &apply
                            ))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Program *self = (Program *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->how.width = width;
    self->how.half = half;
    const Py_ssize_t memories = PyTuple_Size(given);
    if (memories < 0 || width < 1 || memories > MEMORIES_MAX) goto wrong;
    numbers = PyMem_Malloc((4 * memories + 1) * sizeof *numbers);
    self->named = PyMem_Calloc(memories + 1, sizeof *self->named);
    if (numbers == NULL || self->named == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    Py_ssize_t *const names = numbers + memories;
    if (read_numbers(given, numbers, memories) < 0 || read_numbers(named, names, 3 * memories) != 3 * memories)
        goto wrong;
    self->memories = (int)memories;
    for (int memory = 0; memory < memories; memory++) {
        if (numbers[memory] < 0 || numbers[memory] > PY_SSIZE_T_MAX / width) goto wrong;
        self->named[memory] = (Named){
            numbers[memory] * width, (int)names[3 * memory], (int)names[3 * memory + 1], (int)names[3 * memory + 2]
        };
    }
    self->opening = opening;
    self->length = code_bytes / 8;
    self->code = PyMem_Malloc(code_bytes ? code_bytes : 1);
    if (self->code == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    memcpy(self->code, code, code_bytes);
    const int combines = fold != Py_None;
    if (combines ? !has_arithmetic(&self->how, dtype, fold, divide, divisor, divisor_bytes) : divide != Py_None)
        goto wrong;
    if (apply != Py_None && (half || !find_loop(apply, number_of(dtype), &self->apply))) goto wrong;
    if (!is_sound(self)) goto wrong;
    PyMem_Free(numbers);
    return (PyObject *)self;
wrong:
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "this program cannot be run here");
failed:
    PyMem_Free(numbers);
    Py_DECREF(self);
    return NULL;
}

/* -- runs ---------------------------------------------------------------------------------------------------------- */

/* Read the memory of another process; returns 0, or what ends the run. */
static long long read_process(Py_ssize_t process, const char *there, char *into, Py_ssize_t nbytes) {
#if defined(__linux__)
    while (nbytes > 0) {
        struct iovec here = {into, (size_t)nbytes}, remote = {(void *)there, (size_t)nbytes};
        const ssize_t done = process_vm_readv((pid_t)process, &here, 1, &remote, 1, 0);
        if (done <= 0) return done < 0 && errno == ESRCH ? GONE : UNREAD;
        into += done;
        there += done;
        nbytes -= done;
    }
    return 0;
#else
    (void)process, (void)there, (void)into;
    return nbytes > 0 ? UNREAD : 0;
#endif
}

/* Go on to a place of the code; returns what the others have to reach first, or 0. Nothing of Python is touched. */
long long advance_run(Run *self, Py_ssize_t end) {
    const Program *program = self->program;
    ChannelState *channel = self->channel;
    const Py_ssize_t width = program->how.width;
    const Bound *const bound = self->bound;
    const char *terms[RANKS_MAX];
    while (self->place < end) {
        const int64_t *step = program->code + self->place;
        switch (*step) {
        case COPY:
        case STORE:
            if (bound[step[1]].process != 0) {
                const long long failed = read_process(
                    bound[step[1]].process, bound[step[1]].at + step[2] * width, bound[step[3]].at + step[4] * width,
                    step[5] * width
                );
                if (failed) return failed;
                self->place += 6;
                break;
            }
            if (*step == STORE && program->apply.loop != NULL) {
                char *target = bound[step[3]].at + step[4] * width;
                const char *value = bound[step[1]].at + step[2] * width;
                combine(&program->apply, target, value, width, target, step[5], width);
                self->place += 6;
                break;
            }
            memmove(bound[step[3]].at + step[4] * width, bound[step[1]].at + step[2] * width, step[5] * width);
            self->place += 6;
            break;
        case FOLD:
            for (int64_t term = 0; term < step[4]; term++)
                terms[term] = bound[step[5 + 2 * term]].at + step[6 + 2 * term] * width;
            fold_terms(&program->how, terms, (int)step[4], bound[step[1]].at + step[2] * width, step[3] * width);
            self->place += 5 + 2 * step[4];
            break;
        case PUBLISH:
            channel->phase += 1;
            store(channel, channel->entry + channel->phase_at, (uint64_t)channel->phase);
            self->place += 1;
            break;
        default: {
            const long long need = step[1] - channel->phase;
            if (need < 0 && !have_come(channel, need, self->keeps_lock ? PATIENCE_LOCKED_NS : PATIENCE_NS)) return need;
            self->place += 2;
        }
        }
    }
    return 0;
}

static PyObject *run_next(PyObject *object) {
    Run *self = (Run *)object;
    long long need;
    if (self->keeps_lock) {
        need = advance_run(self, self->program->length);
    } else {
        Py_BEGIN_ALLOW_THREADS need = advance_run(self, self->program->length);
        Py_END_ALLOW_THREADS
    }
    return need == 0 ? NULL : PyLong_FromLongLong(need);
}

static PyObject **run_references(PyObject *object, int place) {
    Run *self = (Run *)object;
    PyObject **all[] = {(PyObject **)&self->program, (PyObject **)&self->channel, &self->arrays};
    return place < (int)(sizeof all / sizeof all[0]) ? all[place] : NULL;
}

static int run_traverse(PyObject *object, visitproc visit, void *arg) {
    return visit_all(object, run_references, visit, arg);
}

static int run_clear(PyObject *object) {
    clear_all(object, run_references);
    return 0;
}

static void run_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    run_clear(object);
    PyMem_Free(((Run *)object)->scratch);
    PyMem_Free(((Run *)object)->bound);
    release_object(object);
}

/* A run of a program, and of others that have at most so many memories. */
Run *new_run(Program *program, ChannelState *channel, PyObject *arrays, int keeps_lock, int memories) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(run_type, Py_tp_alloc);
    Run *self = (Run *)allocate(run_type, 0);
    if (self == NULL) return NULL;
    self->bound = PyMem_Calloc(memories + 1, sizeof *self->bound);
    if (self->bound == NULL) {
        Py_DECREF(self);
        PyErr_NoMemory();
        return NULL;
    }
    self->program = (Program *)Py_NewRef((PyObject *)program);
    self->channel = (ChannelState *)Py_NewRef((PyObject *)channel);
    self->arrays = Py_NewRef(arrays);
    self->keeps_lock = keeps_lock;
    return self;
}

/* Return where a memory of one long vector begins, from what all ranks have told of theirs; NULL where it is not within
 * the arena. */
static char *find_memory(
    const ChannelState *channel, int kind, int rank, int place, int64_t nbytes, const uint64_t *sources,
    const uint64_t *targets
) {
    uint64_t offset;
    if (rank < 0 || rank >= channel->size) return NULL;
    if (kind == LYING) {
        offset = sources[rank] >> 1;
    } else if (kind == GOAL) {
        offset = targets[rank];
    } else {
        const uint64_t base = seen(channel, entry_of(channel, rank) + channel->segments_at);
        if (base == 0 || place < 0 || place > 1) return NULL;
        offset = kind == CELLS
                     ? base + ((sources[rank] & 1) ^ (uint64_t)place) * (uint64_t)channel->segment_bytes
                     : base + 2 * (uint64_t)channel->segment_bytes + (uint64_t)place * (uint64_t)channel->part_bytes;
    }
    if (offset == 0 || offset > (uint64_t)channel->memory.len) return NULL;
    return is_within((Py_ssize_t)offset, nbytes, channel->memory.len) ? (char *)channel->memory.buf + offset : NULL;
}

/* Find the memories of a program for one vector. Without `targets` only what this rank brings itself is known. */
int bind_vector(
    Run *self, char *x, int64_t x_bytes, char *out, int64_t out_bytes, const uint64_t *sources, const uint64_t *targets
) {
    const Program *program = self->program;
    for (int memory = 0; memory < program->memories; memory++) {
        const int kind = program->named[memory].kind, rank = program->named[memory].rank,
                  place = program->named[memory].place;
        const int64_t nbytes = program->named[memory].nbytes;
        char **at = &self->bound[memory].at;
        if (kind == SOURCE || kind == TARGET) {
            *at = place != 0 || nbytes > (kind == SOURCE ? x_bytes : out_bytes) ? NULL : kind == SOURCE ? x : out;
        } else if (kind == SCRATCH) {
            if (self->scratch == NULL) self->scratch = PyMem_Malloc(nbytes);
            *at = self->scratch;
        } else if (targets == NULL && rank != self->channel->rank) {
            continue;
        } else {
            *at = find_memory(self->channel, kind, rank, place, nbytes, sources, targets);
        }
        if (*at == NULL) return 0;
    }
    return 1;
}

/* Return whether all memories of an opening have been found. */
static int is_opening_bound(const Run *self) {
    const Program *program = self->program;
    for (Py_ssize_t place = 0; place < program->opening; place += 6) {
        const int64_t *step = program->code + place;
        if (self->bound[step[1]].at == NULL || self->bound[step[3]].at == NULL) return 0;
    }
    return 1;
}

/* Run(program, channel, arrays, offsets, keeps_lock, opens): memory k is arrays[k] where offsets[k] is -1, else that
 * place of the arena. Its opening has been done; or is done now, and nothing else may be then: arrays[k] is None of what
 * it does not use. */
static PyObject *run_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *program, *channel, *arrays, *given;
    int keeps_lock, opens;
    (void)type;
    if (keywords != NULL || !PyArg_ParseTuple(
                                arguments, "O!O!O!Opp", program_type, &program, channel_state_type, &channel,
                                &PyTuple_Type, &arrays, &given, &keeps_lock, &opens
                            ))
        return NULL;
    const Program *made = (const Program *)program;
    const ChannelState *state = (const ChannelState *)channel;
    if (!state->is_bound || PyTuple_Size(given) != made->memories || PyTuple_Size(arrays) != made->memories) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a run takes an array or an offset for each memory");
        return NULL;
    }
    Run *self = new_run((Program *)program, (ChannelState *)channel, arrays, keeps_lock, made->memories);
    if (self == NULL) return NULL;
    self->place = made->opening;
    for (int memory = 0; memory < made->memories; memory++) {
        const Named *named = &made->named[memory];
        Bound *bound = &self->bound[memory];
        const Py_ssize_t offset = PyLong_AsSsize_t(PyTuple_GetItem(given, memory));
        Py_ssize_t room = -1;
        if (PyErr_Occurred()) {
            Py_DECREF(self);
            return NULL;
        }
        if (offset >= ADDRESS) {
            if (named->kind == LYING && made->how.fold.loop == NULL && made->apply.loop == NULL && named->rank >= 0 &&
                named->rank < state->size && state->processes[named->rank] != 0) {
                *bound = (Bound){(char *)(offset - ADDRESS), state->processes[named->rank]};
                room = named->nbytes;
            }
        } else if (offset >= 0) {
            bound->at = (char *)state->memory.buf + offset;
            room = state->memory.len - offset;
        } else if (opens && PyTuple_GetItem(arrays, memory) == Py_None) {
            continue;
        } else {
            const Array *array = (const Array *)PyTuple_GetItem(arrays, memory);
            PyObject *nbytes = PyObject_GetAttrString((PyObject *)array, "nbytes");
            room = nbytes == NULL ? -1 : PyLong_AsSsize_t(nbytes);
            Py_XDECREF(nbytes);
            if ((array->flags & (IN_ONE_PIECE | ALIGNED)) != (IN_ONE_PIECE | ALIGNED)) room = -1;
            bound->at = array->data;
        }
        if (room < named->nbytes) {
            Py_DECREF(self);
            PyErr_Format(PyExc_ValueError, "memory %d of a program is shorter than it is used", memory);
            return NULL;
        }
    }
    if (opens) {
        if (!is_opening_bound(self)) {
            Py_DECREF(self);
            PyErr_SetString(PyExc_ValueError, "an opening uses a memory that is not known");
            return NULL;
        }
        self->place = 0;
        if (keeps_lock) {
            advance_run(self, made->opening);
        } else {
            Py_BEGIN_ALLOW_THREADS advance_run(self, made->opening);
            Py_END_ALLOW_THREADS
        }
        self->place = made->length; /* what follows needs all memories */
    }
    return (PyObject *)self;
}

static PyType_Slot program_slots[] = {
    {Py_tp_new, program_new},
    {Py_tp_dealloc, program_dealloc},
    {Py_tp_traverse, program_traverse},
    {Py_tp_clear, program_clear},
    {Py_tp_doc, "A program that has been looked at: its instructions use their memories within their sizes."},
    {0, NULL},
};

PyType_Spec program_spec = {
    "syncvar.kernel.native.Program", sizeof(Program), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, program_slots,
};

static PyType_Slot run_slots_of_type[] = {
    {Py_tp_new, run_new},
    {Py_tp_dealloc, run_dealloc},
    {Py_tp_traverse, run_traverse},
    {Py_tp_clear, run_clear},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, run_next},
    {Py_tp_doc, "A call of a program: yields what the others have to reach before it can go on."},
    {0, NULL},
};

PyType_Spec run_spec = {
    "syncvar.kernel.native.Run", sizeof(Run), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, run_slots_of_type,
};
