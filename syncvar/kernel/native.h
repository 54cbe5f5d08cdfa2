/* What the parts of the C runner share: channels, the forms of arrays, and NumPy's inner loops. */
#ifndef SYNCVAR_NATIVE_H
#define SYNCVAR_NATIVE_H
#include "common.h"

#define BLOCK 8192 /* bytes that are combined at a time: all terms of a block stay in the first cache */
#define RANKS_MAX 64
#define LEVELS 6 /* of a tree over RANKS_MAX ranks */
#define SPREAD 0x9E3779B97F4A7C15ull

/* -- what a channel knows: of its own progress, and where all ranks' words and slots are --------------------------- */

typedef struct {
    PyObject_HEAD long long side, last, phase, tail; /* both runners read and write these */
    char is_settled, is_bound;
    Py_buffer memory;
    uint64_t *words;
    Py_ssize_t entry, check_at, phase_at, done_at, source_at, target_at, abort_at, segments_at, side_bytes,
        segment_bytes, part_bytes;
    Py_ssize_t others[RANKS_MAX], slots[RANKS_MAX];
    Py_ssize_t processes[RANKS_MAX]; /* whose memory can be read; 0 where it cannot */
    int size, rank, shares_cores, looks, turn; /* of the slots that take turns, the last one */
    PyObject *begun; /* the call that waits to be ended, see native.c; it takes itself out when it goes */
} ChannelState;

static inline uint64_t seen(const ChannelState *channel, Py_ssize_t place) {
    return __atomic_load_n(channel->words + place, __ATOMIC_ACQUIRE);
}

static inline void store(ChannelState *channel, Py_ssize_t place, uint64_t value) {
    __atomic_store_n(channel->words + place, value, __ATOMIC_RELEASE);
}

static inline Py_ssize_t entry_of(const ChannelState *channel, int rank) {
    return rank == channel->rank ? channel->entry
                                 : channel->others[(rank - channel->rank + channel->size) % channel->size - 1];
}

int64_t now_ns(void);
int have_come(const ChannelState *channel, long long need, int64_t patience_ns);
Py_ssize_t read_numbers(PyObject *given, Py_ssize_t *into, Py_ssize_t most);
int is_within(Py_ssize_t start, Py_ssize_t nbytes, Py_ssize_t whole);
void release_object(PyObject *self);

/* Visit, or let go of, all that an object holds, as the collector of garbage asks for. */
typedef PyObject **(*References)(PyObject *object, int place);
int visit_all(PyObject *object, References references_of, visitproc visit, void *arg);
void clear_all(PyObject *object, References references_of);

/* -- arrays -------------------------------------------------------------------------------------------------------- */

#define NDIM_MAX 64

/* The shape that an array has to have. */
typedef struct {
    PyObject *dtype;
    int ndim;
    intptr_t shape[NDIM_MAX];
    Py_ssize_t nbytes;
} Form;

int read_form(PyObject *given, Form *form);

/* -- NumPy's inner loops ------------------------------------------------------------------------------------------- */

typedef void (*Loop)(char **arrays, const intptr_t *count, const intptr_t *steps, void *data);

typedef struct {
    Loop loop;
    void *data;
    PyObject *owner; /* the ufunc, alive as long as its loop is used */
} Step;

int find_loop(PyObject *ufunc, int number, Step *found);

static inline void combine(
    const Step *step, const char *left, const char *right, intptr_t right_step, char *out, intptr_t count,
    intptr_t width
) {
    char *arrays[3] = {(char *)left, (char *)right, out};
    const intptr_t steps[3] = {width, right_step, width};
    step->loop(arrays, &count, steps, step->data);
}

/* How the terms of ranks become one: by which op, divided by what. */
typedef struct {
    Step fold, divide;
    char divisor[16];
    Py_ssize_t width; /* of an element, in bytes */
    int half;         /* terms are halves, which are combined as float32 and rounded once */
} Arithmetic;

enum { NO_HALF, FLOAT16, BFLOAT16 };

int number_of(PyObject *dtype);
int has_arithmetic(
    Arithmetic *how, PyObject *dtype, PyObject *fold, PyObject *divide, const char *divisor, Py_ssize_t divisor_bytes
);
void fold_terms(const Arithmetic *how, const char *const *terms, int count, char *out, Py_ssize_t nbytes);

/* -- programs ------------------------------------------------------------------------------------------------------ */

#define MEMORIES_MAX (1 << 16)

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

/* A program that has been looked at, see syncvar/execution/program.py: COPY and STORE are (source, first, target,
 * first, count), FOLD is (target, first, count, terms, (term, first)...), AWAIT is (back). */
typedef struct {
    PyObject_HEAD int64_t *code;
    Py_ssize_t length, opening; /* of the code; so many numbers come before phase 0 is published */
    Named *named;
    int memories;
    Arithmetic how;
    Step apply;
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
} Run;

Run *new_run(Program *program, ChannelState *channel, PyObject *arrays, int keeps_lock, int memories);
int bind_vector(
    Run *self, char *x, int64_t x_bytes, char *out, int64_t out_bytes, const uint64_t *sources, const uint64_t *targets
);
long long advance_run(Run *self, Py_ssize_t end);

extern PyType_Spec program_spec, run_spec;
extern PyTypeObject *channel_state_type, *program_type, *run_type;

PyObject *run_slots(PyObject *slot_call, PyObject *x, PyObject *out, PyObject *said, PyObject *timeout);
int add_type(PyObject *module, PyType_Spec *spec, const char *name, PyTypeObject **kept);
int add_writes(PyObject *module);
extern PyTypeObject *slot_call_type;

/* -- variables ----------------------------------------------------------------------------------------------------- */

/* What is counted of a variable; see syncvar/variables/prepared.py. */
typedef struct {
    PyObject_HEAD long long writes, collectives, added, steps;
} Tally;

/* Whether a call of all replicas writes a copy, and how often it has gone to other memory. */
typedef struct {
    PyObject_HEAD long long moves;
    char is_being_written;
} Copied;

int add_groups(PyObject *module, PyTypeObject *tally, PyTypeObject *copied);

#endif
