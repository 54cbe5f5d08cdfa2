/* Persistent calls: `persistent_call.c` builds them, `persistent_call_exec.c` runs them, `pytree.c`
 * handles several arrays, `async_call.c` asynchronous calls, and `dispatch.c` finds them. */
#ifndef SYNCVAR_CALLS_H
#define SYNCVAR_CALLS_H
#include "native.h"

#define PLACEMENTS_MAX 4

/* A copy from the input to this rank's slot, or from a slot or the input to the result. */
typedef struct {
    Py_ssize_t from, to, nbytes, rank; /* rank: owner of the slot it reads; -1: the input */
} Copy;

/* Where the long vectors of all ranks are, and the program for it. */
typedef struct {
    uint64_t sources;        /* bits of the ranks whose input is in shared memory */
    int into_all, by_owners; /* all targets are in shared memory; a target is its own source */
    int last_side;           /* side of the cells that is written last; -1 for none */
    Program *program;
} Placement;

#define LEAF_NDIM_MAX 8

/* Arrays of one dtype among several. */
typedef struct {
    Arithmetic arithmetic; /* of the terms in the slots */
    PyObject *dtype;
    PyTypeObject *number;    /* Python type whose numbers become this dtype, or NULL */
    Py_ssize_t start, count; /* start of their vector in a slot, and its elements */
} DtypeGroup;

/* One of several arrays that form one vector for each dtype. */
typedef struct {
    int ndim, is_separate; /* is_separate: long enough to be reduced by itself if it is in shared
                           memory on any rank */
    int group;
    Py_ssize_t first, count; /* elements of its group before it, and its own */
    intptr_t shape[LEAF_NDIM_MAX];
} Leaf;

typedef struct {
    PyObject_HEAD PyObject *face;
    ChannelState *channel;
    CommunicatorState *communicator;
    PyObject *call; /* the PersistentCall: it makes unusual calls, and continues those that wait */
    PyObject *engine, *busy, *queue, *add, *info, *async_calls, *work;
    PyObject *no_result;               /* the result on a rank that gets none; else None */
    PyObject *gil_monitor;             /* a call with a long vector keeps the GIL on its alert */
    PyObject *structure, *leaves_type; /* TreeDef and class `PyTree` of several arrays; else None */
    PyObject *make_arguments, *leaf_arguments;
    PyObject *op, *persistent_calls; /* parts of its cache key */
    Form input, output;
    Copy puts[RANKS_MAX], takes[RANKS_MAX + 1], terms[RANKS_MAX];
    int put_count, take_count, term_count;
    Leaf *leaves;   /* arrays whose concatenation is the input, and the result */
    int leaf_count; /* 0: one array */
    DtypeGroup groups[DTYPES_MAX];
    int group_count, first_small; /* first_small: first group in slots; 1 after a long vector */
    int span_count;               /* arrays of the long vector */
    char *room;                   /* scratch memory for combining small arrays */
    PyObject *kept_values, *kept_leaves, *kept_room, *kept_groups;
    int parts; /* the caller gets a list of so many parts of the result; 0: the result itself */
    uint64_t fingerprint, detail;
    int moves_blocks;      /* publish the check without the detail, and locations of long blocks */
    int reads;             /* read long blocks in the processes of their ranks */
    Py_ssize_t ring;       /* offset of the slots that take turns; 0: none; -1: not used */
    Arithmetic arithmetic; /* of the terms in the slots */
    Step apply;
    int is_long, is_everywhere; /* a long vector; all ranks get all of it (else inputs that others
                              read are never overwritten) */
    Placement placements[PLACEMENTS_MAX]; /* programs of a long vector by placement; in the first
                                             all are copied */
    int memories;                         /* most memories of these programs */
    int64_t scratch_bytes;
} NativeCall;

/* Return the size of an array in the slots, where halves are float32. */
static inline Py_ssize_t in_slots(const NativeCall *self, const Form *form) {
    return self->arithmetic.half ? 2 * form->nbytes : form->nbytes;
}

/* of pytree.c */
int intern_kinds(void);
PyTypeObject *container_of(PyObject *structure);
int read_leaves(NativeCall *self, PyObject *groups, PyObject *given);
int holds_leaves(const NativeCall *self, PyObject *value);
PyObject *leaves_of(const NativeCall *self, PyObject *value, int flags);
int are_leaves(const NativeCall *self, PyObject *arrays, int flags);
PyObject *make_leaves(const NativeCall *self);
PyObject *structure_of(const NativeCall *self, PyObject *arrays);
void find_spans(const NativeCall *self, PyObject *arrays, Span *spans);
int leaves_do_not_overlap(const NativeCall *self, PyObject *input, PyObject *output);
int lies_alone(const NativeCall *self, const Span *spans);
void put_leaves(const NativeCall *self, char *slot, PyObject *arrays);
void combine_leaves(const NativeCall *self, const char *const *slots, PyObject *arrays);

/* of persistent_call.c */
int accept(const NativeCall *self, PyObject *x, PyObject *out, PyObject **input, PyObject **target);
int fit_still(const NativeCall *self, const Form *form, PyObject *arrays, int flags);
int are_all_put(const NativeCall *self);
int ignores_input(const NativeCall *self);
PyObject *make_result(const NativeCall *self, PyObject *target);
PyObject *result_of(const NativeCall *self, PyObject *output);

/* of persistent_call_exec.c */
int may_begin(const NativeCall *self);
long long take_number(const NativeCall *self, PyObject **number);
uint64_t put_own(const NativeCall *self, int side, PyObject *x);
void publish_call(const NativeCall *self, long long call, uint64_t check, uint64_t source,
                  uint64_t target);
int all_agree(const NativeCall *self, uint64_t check, int64_t patience_ns);
void finish(const NativeCall *self, int side, const char *input, PyObject *output);
void interrupt_call(NativeCall *self, PyObject *number, PyObject *began, PyObject *spec);

/* of async_call.c */
enum { POLL_ONCE = -1, SPIN_SHORT = 0 }; /* patience in nanoseconds */
int end_async_call(PyObject *object, int64_t patience_ns);
PyObject *start_call(NativeCall *self, PyObject *x, PyObject *out, PyObject *timeout,
                     PyObject *site, PyObject *instruction);

#endif
