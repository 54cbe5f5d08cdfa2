/* What the parts of the C extension share. Only the limited API of CPython is used: one build
 * serves every version from 3.11 on.
 *
 * Each part uses those above it: `object_support.c` what objects have in common; `memory_copy.c`,
 * `reduce_kernels.c` what is done with bytes; `channels.c` what ranks tell each other;
 * `program_check.c`, `program_exec.c` programs; `pytree.c`, `persistent_call.c`,
 * `persistent_call_exec.c`, `async_call.c`, `dispatch.c` prepared calls; `variable_access.c`
 * variables; `p2p.c`, `p2p_endpoints.c` messages; `module.c` the module. */
#ifndef SYNCVAR_NATIVE_H
#define SYNCVAR_NATIVE_H
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#include "constants.h"

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() ((void)0)
#endif

#define YIELD_NS                                                                                   \
    100000 /* so long a rank gives way to others of its cores, before Python goes on               \
            */
#define PATIENCE_NS                                                                                \
    1000000 /* so long others are waited for without Python's lock, before Python waits */

/* -- objects ----------------------------------------------------------------------------------- */

/* Names of attributes and arguments. */
#define NAMES(X)                                                                                   \
    X(_beneath)                                                                                    \
    X(_communicator)                                                                               \
    X(_ground)                                                                                     \
    X(_references) X(_shown) X(acquire) X(append) X(array) X(async_op) X(channel) X(co_filename)   \
        X(default) X(engine) X(f_lasti) X(group) X(is_alert) X(is_bound) X(locked) X(out)          \
            X(prepared_calls) X(release) X(remove) X(stack) X(tag) X(timeout) X(uneven) X(view)    \
                X(world)
#define DECLARED(NAME) extern PyObject *name_##NAME;
NAMES(DECLARED)

int intern_names(void);

/* What an object holds is told by its members: all of T_OBJECT are the collector's, and go with it.
 * Those whose names begin with an underscore are its own, the others are given when it is made. */
#define HOLDS(TYPE, MEMBER, NAME) {NAME, T_OBJECT, offsetof(TYPE, MEMBER), READONLY, NULL}
#define HELD(TYPE, MEMBER) HOLDS(TYPE, MEMBER, #MEMBER)
#define HOLDING                                                                                    \
    {Py_tp_traverse, traverse_held}, {Py_tp_clear, clear_held}, { Py_tp_dealloc, dealloc_held }

/* The type of a struct, by its members and slots. */
#define TYPE(NAME, PREFIX, MEMBERS, FLAGS, TOLD, ...)                                              \
    static PyType_Slot PREFIX##_type_slots[] = {                                                   \
        {Py_tp_members, MEMBERS},                                                                  \
        {Py_tp_doc, TOLD},                                                                         \
        __VA_ARGS__,                                                                               \
        {0, NULL},                                                                                 \
    };                                                                                             \
    PyType_Spec PREFIX##_spec = {                                                                  \
        "syncvar._native.native." #NAME, sizeof(NAME),        0,                                   \
        Py_TPFLAGS_DEFAULT | (FLAGS),    PREFIX##_type_slots,                                      \
    };
#define TYPES(X)                                                                                   \
    X(admission_state)                                                                             \
    X(communicator_state)                                                                          \
    X(variable_counters)                                                                                       \
    X(check_gate) X(copy_guard) X(channel_state) X(program) X(run) X(slot_call) X(async_call) X(entrance)        \
        X(write) X(look) X(read) X(group) X(message_counter) X(end) X(message_entrance)
#define DECLARED_TYPE(PREFIX)                                                                      \
    extern PyType_Spec PREFIX##_spec;                                                              \
    extern PyTypeObject *PREFIX##_type;
TYPES(DECLARED_TYPE)

int traverse_held(PyObject *object, visitproc visit, void *arg);
int clear_held(PyObject *object);
void dealloc_held(PyObject *object);
void dealloc_object(PyObject *object);
void *new_object(PyTypeObject *type);
void *new_holding(PyTypeObject *type, PyObject *keywords);
void *new_room(PyObject **holder, Py_ssize_t nbytes);

int is_true(PyObject *owner, PyObject *name);
PyObject *peek(PyObject *owner, PyObject *name);
int call_one(PyObject *owner, PyObject *name, PyObject *argument);
int is_quiet(PyObject *engine);
int is_unlocked(PyObject *lock);
int is_free(PyObject *engine, PyObject *lock);
int try_acquire(PyObject *lock);
void release(PyObject *lock);
int record(PyObject *add, PyObject *told, PyObject *number, PyObject *begin);
int64_t now_ns(void);
Py_ssize_t read_numbers(PyObject *given, Py_ssize_t *into, Py_ssize_t most);
int is_within(Py_ssize_t start, Py_ssize_t nbytes, Py_ssize_t whole);

/* Records: numbers that Python has as attributes. __init__.py says what they mean. */
typedef struct {
    PyObject_HEAD long long driver;
    char is_quiet;
} AdmissionState; /* the beginning of the engine */

typedef struct {
    PyObject_HEAD long long next_call;
} CommunicatorState; /* the beginning of a communicator */

typedef struct {
    PyObject_HEAD long long writes, collectives, added, steps, reads, turned, turns;
} VariableCounters;

typedef struct {
    PyObject_HEAD long long until;
    char is_free;
} CheckGate;

typedef struct {
    PyObject_HEAD long long moves, changes;
    char is_being_written;
} CopyGuard;

#define NUMBER(TYPE, MEMBER) {#MEMBER, T_LONGLONG, offsetof(TYPE, MEMBER), 0, NULL}
#define FLAG(TYPE, MEMBER) {#MEMBER, T_BOOL, offsetof(TYPE, MEMBER), 0, NULL}

/* How callables are called without a tuple and a dict for their arguments (PEP 590). The limited
 * API has it from 3.12 on; 3.11 has it in the same place. */
typedef PyObject *(*Vectorcall)(PyObject *callable, PyObject *const *arguments, size_t given,
                                PyObject *names);
#define HAS_VECTORCALL (1UL << 11)
#define GIVEN(FLAGGED) ((Py_ssize_t)((FLAGGED) & ~((size_t)1 << (8 * sizeof(size_t) - 1))))

/* What a face remembers, without keeping it: it takes itself out when it goes. These are the
 * beginnings of such objects. */
typedef struct {
    PyObject_HEAD PyObject *face; /* where it is remembered, if anywhere */
} Remembered;

#define REMEMBERED 1024 /* by what a call is made of; each face has its own way to find a place */

/* An object that stands for a public function, and makes in C the calls for which it remembers
 * something. */
typedef struct {
    PyObject_HEAD PyObject *function, *state;
    Vectorcall vectorcall;
    Remembered *remembered[REMEMBERED];
} Face;

#define CALLED_BY(TYPE)                                                                            \
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(TYPE, face.vectorcall), READONLY, NULL}

PyObject *face_call(PyObject *object, PyObject *arguments, PyObject *keywords);
void remember(Face *face, Remembered **place, Remembered *object);
void forget(Remembered *object);
PyObject *call_function(PyObject *function, PyObject *const *arguments, Py_ssize_t given,
                        PyObject *names);

PyObject *face_getattr(PyObject *object, PyObject *name);
PyObject *face_repr(PyObject *object);
extern PyGetSetDef face_getsets[];
PyObject *face_reduce(PyObject *object, PyObject *unused);
#define FACE_METHODS {"__reduce__", face_reduce, METH_NOARGS, "Functions are pickled by name."}
#define FACE                                                                                       \
    {Py_tp_call, face_call}, {Py_tp_getattro, face_getattr}, {Py_tp_repr, face_repr}, {            \
        Py_tp_getset, face_getsets                                                                 \
    }

/* -- arrays ------------------------------------------------------------------------------------ */

extern PyObject *array_type, *make_array, *as_array,
    *numpy_add; /* NumPy's ndarray, empty, asarray and add */

int find_numpy(void);

/* The beginning of NumPy's PyArrayObject, which its C interface has kept since version 1. */
typedef struct {
    PyObject_HEAD char *data;
    int ndim;
    intptr_t *shape;
    intptr_t *strides;
    PyObject *base;
    PyObject *dtype;
    int flags;
} Array;

#define IN_ONE_PIECE 0x0001
#define OWNED 0x0004
#define ALIGNED 0x0100
#define WRITEABLE 0x0400
#define NDIM_MAX 64

/* The shape that an array has to have. */
typedef struct {
    PyObject *dtype;
    int ndim;
    intptr_t shape[NDIM_MAX];
    Py_ssize_t nbytes;
} Form;

int read_form(PyObject *dtype, PyObject *shape, Form *form);
int fits_shape(PyObject *dtype, int ndim, const intptr_t *shape, PyObject *value, int flags);
int fits(const Form *form, PyObject *value, int flags);
int is_number(PyObject *value);

/* -- what is done with bytes ------------------------------------------------------------------- */

void choose_copy(void);
extern void (*copy_bytes)(char *target, const char *source, size_t nbytes);

/* What is known of stores to memory that others read. */
typedef struct {
    int has_begun, was_slow; /* where nobody has touched the pages before, copies take long by
                                themselves: so it has to be slow twice */
    int passes, left;        /* copies go past the caches; so many of them go as the last one */
    int timed;               /* copies that have been timed after those */
    int64_t ns, bytes;       /* of these */
} Stores;

int are_apart(const char *one, const char *other, size_t nbytes);
int is_slow_by_string(const char *target, const char *source);
void copy_in(char *target, const char *source, size_t nbytes);
void copy_past(char *target, const char *source, size_t nbytes);
void copy_out(Stores *stores, char *target, const char *source, size_t nbytes);

#define BLOCK                                                                                      \
    8192 /* bytes that are combined at a time: all terms of a block stay in the first cache */
#define LEVELS 6 /* of a tree over RANKS_MAX ranks */

typedef void (*Loop)(char **arrays, const intptr_t *count, const intptr_t *steps, void *data);

/* One of NumPy's inner loops. */
typedef struct {
    Loop loop;
    void *data;
    PyObject *owner; /* the ufunc, alive as long as its loop is used */
} Step;

int find_loop(PyObject *ufunc, int number, Step *found);

static inline void combine(const Step *step, const char *left, const char *right,
                           intptr_t right_step, char *out, intptr_t count, intptr_t width) {
    char *arrays[3] = {(char *)left, (char *)right, out};
    const intptr_t steps[3] = {width, right_step, width};
    step->loop(arrays, &count, steps, step->data);
}

/* How the terms of ranks become one: by which op, divided by what. */
typedef struct {
    Step fold, divide;
    char divisor[16];
    Py_ssize_t width; /* of an element of a term, in bytes */
    int half; /* the kind of halves, which are combined as float32 and rounded once; terms may be
                 float32 already */
    int is_complex;
    Py_ssize_t (*four)(const char *const *terms, char *out,
                       Py_ssize_t nbytes); /* combines four by the tree at once, or NULL */
    Py_ssize_t (*pair)(const char *const *terms, char *out, Py_ssize_t count,
                       float divisor); /* two of halves, and rounds, or NULL */
} Arithmetic;

int read_arithmetic(PyObject *given, Arithmetic *how, Step *apply);
void fold_terms(const Arithmetic *how, const Step *apply, const char *const *terms, int count,
                char *out, Py_ssize_t elements);
void widen(int half, const char *terms, float *out, Py_ssize_t count);

/* -- waiting ----------------------------------------------------------------------------------- */

#define LOOKS_SHORT                                                                                \
    8 /* of who shares its core with those that it waits for, and between two times that it gives  \
         way */

/* How often a rank looks for others before it gives way. Where ranks share cores, those of other
 * cores that run at the same time answer within a few looks, and keep both cores; those of its own
 * core never do. So a rank looks long as long as that pays, and now and then to learn whether it
 * does again. */
typedef struct {
    int looks, shares_cores, missed,
        waits; /* long looks that were for nothing, the last ones; waits without a long look */
} Patience;

/* One wait for something; it is over at once where that is there already. */
typedef struct {
    Patience *patience;
    const uint64_t *abort;
    int64_t patience_ns, until; /* 0: it has not given way yet */
    int looks, most;            /* -1: it has not looked in vain yet */
} Wait;

static inline Wait wait_with(Patience *patience, const uint64_t *abort, int64_t patience_ns) {
    return (Wait){patience, abort, patience_ns, 0, 0, -1};
}

int give_way(Wait *wait);
void note_looks(Wait *wait, int has_come);

#define MISSED_MOST 3   /* long looks for nothing, before there are short ones */
#define SHORT_WAITS 128 /* of these one looks long again */

static inline int looks_of(Patience *patience) {
    if (patience->looks <= LOOKS_SHORT || !patience->shares_cores || patience->missed < MISSED_MOST)
        return patience->looks;
    if (++patience->waits < SHORT_WAITS) return LOOKS_SHORT;
    patience->waits = 0;
    return patience->looks;
}

/* Return whether to look once more, after a look in vain. */
static inline int may_look_again(Wait *wait) {
    if (wait->most < 0) wait->most = looks_of(wait->patience);
    if (++wait->looks > wait->most) return give_way(wait);
    RELAX();
    return 1;
}

/* Note that what was waited for is there. */
static inline void has_come(Wait *wait) {
    if (wait->most >= 0 && wait->until == 0) note_looks(wait, 1);
}

/* -- what a channel knows: of its own progress, and where all ranks' words and slots are ------- */

typedef struct {
    PyObject_HEAD long long side, last, phase, tail; /* both runners read and write these */
    char is_settled, is_bound;
    Py_buffer memory;
    uint64_t *words;
    Py_ssize_t entry, check_at, phase_at, done_at, source_at, target_at, abort_at, segments_at,
        side_bytes, segment_bytes, part_bytes;
    Py_ssize_t others[RANKS_MAX], slots[RANKS_MAX];
    Py_ssize_t processes[RANKS_MAX]; /* whose memory can be read; 0 where it cannot */
    int size, rank, turn;            /* of the slots that take turns, the last one */
    Patience patience;
    Stores stores;
    PyObject *begun; /* the call that waits to be ended, see async_call.c; it takes itself out when
                        it goes */
} ChannelState;

static inline uint64_t seen(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
static inline void store(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline Py_ssize_t entry_of(const ChannelState *channel, int rank) {
    return rank == channel->rank
               ? channel->entry
               : channel->others[(rank - channel->rank + channel->size) % channel->size - 1];
}

int have_come(ChannelState *channel, long long need, int64_t patience_ns);

/* -- programs ---------------------------------------------------------------------------------- */

/* A memory of a program: what it is, and how many bytes of it are used. */
typedef struct {
    int64_t nbytes;
    int kind, rank, place;
} Named;

/* Where it is in one call: here, or in another process, which is read where it lies. */
typedef struct {
    char *at;
    Py_ssize_t process; /* 0: here */
} Bound;

/* A program that has been looked at, see syncvar/runtime/programs/instructions.py: COPY and STORE
 * are (source, first, target, first, count), FOLD is (target, first, count, terms, (term,
 * first)...), AWAIT is (back). */
typedef struct {
    PyObject_HEAD const int64_t *code;
    Py_ssize_t length, opening; /* of the code; so many numbers come before phase 0 is published */
    Named *named;
    int memories;
    int64_t scratch_bytes;
    Arithmetic how;
    Step apply;
    PyObject *kept_code, *kept_named;
} Program;

/* One call of it. */
typedef struct {
    PyObject_HEAD Program *program;
    ChannelState *channel;
    PyObject *arrays; /* what the addresses of arrays belong to */
    Bound *bound;     /* of each memory */
    char *scratch;
    Py_ssize_t place;
    int keeps_lock;
    PyObject *kept_bound, *kept_scratch;
} Run;

Run *new_run(Program *program, ChannelState *channel, PyObject *arrays, int keeps_lock,
             int memories, int64_t scratch_bytes);
/* Where an array lies. */
typedef struct {
    char *at;
    int64_t nbytes;
} Span;

int bind_vector(Run *self, const Span *brought, const Span *made, int count,
                const uint64_t *sources, const uint64_t *targets, int tells);
long long advance_run(Run *self, Py_ssize_t end);

PyObject *note_change(PyObject *module, PyObject *unused);
PyObject *run_slots(PyObject *slot_call, PyObject *x, PyObject *out, PyObject *said,
                    PyObject *timeout);

#endif
