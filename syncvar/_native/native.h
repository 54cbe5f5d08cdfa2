/* Declarations that the files of the C extension share. Only the limited API of CPython is used,
 * so one build serves every version from 3.11 on.
 *
 * Each file uses those above it in this list. `object_support.c`: objects in general.
 * `memory_copy.c`, `reduce_kernels.c`, `checksum.c`: copies and arithmetic. `channels.c`: waiting.
 * `program_check.c`, `program_exec.c`: programs. `pytree.c`, `persistent_call.c`,
 * `persistent_call_exec.c`, `async_call.c`, `dispatch.c`: persistent calls. `variable_access.c`:
 * variables. `p2p.c`: messages. `module.c`: the module. */
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

#define YIELD_NS 100000     /* a rank yields its core to others so long, before Python waits */
#define PATIENCE_NS 1000000 /* longest wait without the GIL, before Python waits */

/* -- objects ----------------------------------------------------------------------------------- */

/* Names of attributes and arguments. */
/* clang-format off */
#define NAMES(X) \
    X(_beneath) X(_communicator) X(_ground) X(_references) X(_shown) X(acquire) X(append) \
    X(array) X(async_op) X(channel) X(co_filename) X(continue_async) X(continue_in_engine) \
    X(copy) X(default) X(engine) X(f_lasti) X(fingerprint) X(group) X(info_of) X(interrupt) \
    X(is_alert) X(is_bound) X(locked) X(out) X(persistent_calls) X(release) X(remove) \
    X(request_of_published) X(stack) X(start) X(tag) X(timeout) X(uneven) X(view) X(world)
/* clang-format on */
#define DECLARED(NAME) extern PyObject *name_##NAME;
NAMES(DECLARED)

int intern_names(void);

/* An object owns a reference for each T_OBJECT member; the garbage collector visits all of them.
 * Members whose names begin with an underscore are private. The constructor takes all others as
 * keyword arguments. */
#define HOLDS(TYPE, MEMBER, NAME) {NAME, T_OBJECT, offsetof(TYPE, MEMBER), READONLY, NULL}
#define HELD(TYPE, MEMBER) HOLDS(TYPE, MEMBER, #MEMBER)
#define HOLDING                                                                                    \
    {Py_tp_traverse, traverse_held}, {Py_tp_clear, clear_held}, { Py_tp_dealloc, dealloc_held }

/* Define the Python type of a struct, from its members and slots. */
#define TYPE(NAME, PREFIX, MEMBERS, FLAGS, DOC, ...)                                               \
    static PyType_Slot PREFIX##_type_slots[] = {                                                   \
        {Py_tp_members, MEMBERS},                                                                  \
        {Py_tp_doc, DOC},                                                                          \
        __VA_ARGS__,                                                                               \
        {0, NULL},                                                                                 \
    };                                                                                             \
    PyType_Spec PREFIX##_spec = {                                                                  \
        "syncvar._native.native." #NAME, sizeof(NAME),        0,                                   \
        Py_TPFLAGS_DEFAULT | (FLAGS),    PREFIX##_type_slots,                                      \
    };
/* clang-format off */
#define TYPES(X) \
    X(admission_state) X(communicator_state) X(variable_counters) X(check_gate) X(copy_guard) \
    X(channel_state) X(program) X(run) X(native_call) X(async_call) X(call_dispatch) X(write) \
    X(look) X(read) X(group) X(end) X(message_dispatch)
/* clang-format on */
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
int record(PyObject *add, PyObject *info, PyObject *number, PyObject *began, PyObject *site,
           PyObject *instruction);
int64_t now_ns(void);
Py_ssize_t read_numbers(PyObject *given, Py_ssize_t *into, Py_ssize_t most);
int is_within(Py_ssize_t start, Py_ssize_t nbytes, Py_ssize_t whole);

/* Structs whose numbers are attributes in Python. __init__.py explains the attributes. */
typedef struct {
    PyObject_HEAD long long driver;
    char is_quiet;
} AdmissionState; /* base class of the engine */

typedef struct {
    PyObject_HEAD long long next_call;
} CommunicatorState; /* base class of a communicator */

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

/* Calls without a tuple and a dict for the arguments (PEP 590). The limited API has them from 3.12
 * on; 3.11 has the same layout. */
typedef PyObject *(*Vectorcall)(PyObject *callable, PyObject *const *arguments, size_t given,
                                PyObject *names);
#define HAS_VECTORCALL (1UL << 11)
#define GIVEN(FLAGGED) ((Py_ssize_t)((FLAGGED) & ~((size_t)1 << (8 * sizeof(size_t) - 1))))

/* First fields of an object that a Face caches. The cache owns no reference: the object removes
 * itself when it is freed. */
typedef struct {
    PyObject_HEAD PyObject *face; /* the face that caches it, or NULL */
} Remembered;

#define REMEMBERED 1024 /* entries of a cache */

/* Callable that replaces a public function. It makes calls in C if it finds them in its cache, and
 * calls the function otherwise. */
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

/* dtype and shape that an array must have. */
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

/* -- copies and arithmetic --------------------------------------------------------------------- */

void choose_copy(void);
void prepare_checksum(void);
PyObject *crc32_of(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
extern void (*copy_bytes)(char *target, const char *source, size_t nbytes);

/* Measurements of copies to memory that other ranks read; see copy_out. */
typedef struct {
    int has_begun, was_slow; /* first copies to new pages are slow: so only two slow series count */
    int passes, left;        /* whether copies bypass the caches; copies before the next series */
    int timed;               /* copies timed in this series */
    int64_t ns, bytes;       /* their total time and size */
} Stores;

int are_apart(const char *one, const char *other, size_t nbytes);
int is_slow_by_string(const char *target, const char *source);
void copy_in(char *target, const char *source, size_t nbytes);
void copy_past(char *target, const char *source, size_t nbytes);
void copy_out(Stores *stores, char *target, const char *source, size_t nbytes);

#define BLOCK 8192 /* bytes combined at a time: all terms of a block stay in the L1 cache */
#define LEVELS 6   /* height of a tree over RANKS_MAX ranks */

typedef void (*Loop)(char **arrays, const intptr_t *count, const intptr_t *steps, void *data);

/* One of NumPy's inner loops. */
typedef struct {
    Loop loop;
    void *data;
    PyObject *owner; /* the ufunc, which owns the loop */
} Step;

int find_loop(PyObject *ufunc, int number, Step *found);

static inline void combine(const Step *step, const char *left, const char *right,
                           intptr_t right_step, char *out, intptr_t count, intptr_t width) {
    char *arrays[3] = {(char *)left, (char *)right, out};
    const intptr_t steps[3] = {width, right_step, width};
    step->loop(arrays, &count, steps, step->data);
}

/* How inputs of ranks are combined: op and divisor. */
typedef struct {
    Step fold, divide;
    char divisor[16];
    Py_ssize_t width; /* bytes of an element of a term */
    int half; /* HalfType: halves are combined as float32 and rounded once; terms may already be
                 float32 */
    int is_complex;
    Py_ssize_t (*four)(const char *const *terms, char *out,
                       Py_ssize_t nbytes); /* combines four terms by the tree, or NULL */
    Py_ssize_t (*pair)(const char *const *terms, char *out, Py_ssize_t count,
                       float divisor); /* combines and rounds two terms of halves, or NULL */
} Arithmetic;

int read_arithmetic(PyObject *given, Arithmetic *how, Step *apply);
void fold_terms(const Arithmetic *how, const Step *apply, const char *const *terms, int count,
                char *out, Py_ssize_t elements);
void widen(int half, const char *terms, float *out, Py_ssize_t count);

/* -- waiting ----------------------------------------------------------------------------------- */

#define LOOKS_SHORT 8 /* polls of a short spin, and between two yields of the core */

/* Spin budget of a rank. If ranks share cores, a rank on another core answers within a few polls,
 * and a rank on the same core never does. So a rank spins long as long as that succeeds. Now and
 * then it tries a long spin, to learn whether it succeeds again. */
typedef struct {
    int looks, shares_cores; /* polls of a long spin */
    int missed, waits;       /* last long spins that failed; waits without a long spin since */
} Patience;

/* One wait; it ends at once if the condition holds already. */
typedef struct {
    Patience *patience;
    const uint64_t *abort;
    int64_t patience_ns, until; /* until: 0 before the first yield */
    int looks, most;            /* most: -1 before the first failed poll */
} Wait;

static inline Wait wait_with(Patience *patience, const uint64_t *abort, int64_t patience_ns) {
    return (Wait){patience, abort, patience_ns, 0, 0, -1};
}

int give_way(Wait *wait);
void note_looks(Wait *wait, int has_come);

#define MISSED_MOST 3   /* failed long spins before short ones */
#define SHORT_WAITS 128 /* short spins before a long one */

static inline int looks_of(Patience *patience) {
    if (patience->looks <= LOOKS_SHORT || !patience->shares_cores || patience->missed < MISSED_MOST)
        return patience->looks;
    if (++patience->waits < SHORT_WAITS) return LOOKS_SHORT;
    patience->waits = 0;
    return patience->looks;
}

/* Return whether to poll again, after a failed poll. */
static inline int may_look_again(Wait *wait) {
    if (wait->most < 0) wait->most = looks_of(wait->patience);
    if (++wait->looks > wait->most) return give_way(wait);
    RELAX();
    return 1;
}

/* Record that the wait has succeeded. */
static inline void note_success(Wait *wait) {
    if (wait->most >= 0 && wait->until == 0) note_looks(wait, 1);
}

/* -- channels: own progress, and the words and slots of all ranks ----------------------------- */

typedef struct {
    PyObject_HEAD long long side, last, phase, tail; /* C and Python read and write these */
    char is_settled, is_bound;
    Py_buffer memory;
    uint64_t *words;
    Py_ssize_t entry, check_at, phase_at, done_at, source_at, target_at, abort_at, segments_at,
        side_bytes, segment_bytes, part_bytes;
    Py_ssize_t others[RANKS_MAX], slots[RANKS_MAX];
    Py_ssize_t processes[RANKS_MAX]; /* process ids; 0 if its memory cannot be read */
    int size, rank, turn;            /* turn: last used slot of the ring */
    Patience patience;
    Stores stores;
    PyObject *open_call; /* the open AsyncCall, borrowed; it removes itself when it is freed */
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

int wait_for_others(ChannelState *channel, long long need, int64_t patience_ns);

/* -- programs ---------------------------------------------------------------------------------- */

/* Memory of a program: kind, rank, place, and the bytes that are used. */
typedef struct {
    int64_t nbytes;
    int kind, rank, place;
} Named;

/* Address of a memory in one call: in this process, or in another one. */
typedef struct {
    char *at;
    Py_ssize_t process; /* 0: this one */
} Bound;

/* A checked program; syncvar/runtime/instructions.py explains programs. COPY and STORE
 * are (source, first, target, first, count), COMBINE is (target, first, count, terms, (term,
 * first)...), AWAIT is (back). */
typedef struct {
    PyObject_HEAD const int64_t *code;
    Py_ssize_t length, opening; /* numbers of the code; numbers before phase 0 is published */
    Named *named;
    int memories;
    int64_t scratch_bytes;
    Arithmetic arithmetic;
    Step apply;
    PyObject *kept_code, *kept_named;
} Program;

/* One call of a program. */
typedef struct {
    PyObject_HEAD Program *program;
    ChannelState *channel;
    PyObject *arrays; /* owners of the addresses */
    Bound *bound;     /* address of each memory */
    char *scratch;
    Py_ssize_t place;
    int keeps_lock;
    PyObject *kept_bound, *kept_scratch;
} Run;

Run *new_run(Program *program, ChannelState *channel, PyObject *arrays, int keeps_lock,
             int memories, int64_t scratch_bytes);
/* Memory of an array. */
typedef struct {
    char *at;
    int64_t nbytes;
} Span;

int bind_vector(Run *self, const Span *input, const Span *output, int count,
                const uint64_t *sources, const uint64_t *targets, int moves_blocks);
long long advance_run(Run *self, Py_ssize_t end);

PyObject *note_change(PyObject *module, PyObject *unused);
PyObject *run_call(PyObject *native_call, PyObject *x, PyObject *out, PyObject *spec,
                   PyObject *timeout);

#endif
