/* Persistent calls: `persistent_call.c` makes them, `persistent_call_exec.c` runs them, `pytree.c`
 * has those of several arrays, `async_call.c` those that are waited for later; `dispatch.c` finds
 * them. */
#ifndef SYNCVAR_CALLS_H
#define SYNCVAR_CALLS_H
#include "native.h"

#define PATTERNS 4

/* What is copied: from what this rank brings into its slot, or from somewhere into the result. */
typedef struct {
    Py_ssize_t from, to, nbytes, rank; /* whose slot it comes from; -1 for what this rank brings */
} Copy;

/* What is done with long vectors that lie in some way. */
typedef struct {
    uint64_t sources;        /* ranks whose vector lies in the shared memory, as bits */
    int into_all, by_owners; /* all targets lie there; a target is its source */
    int last_side;           /* of the cells, see program.py; -1 where none is written */
    Program *program;
} Known;

#define LEAF_NDIM_MAX 8

/* Arrays of one dtype among several. */
typedef struct {
    Arithmetic how; /* of their terms, in the slots */
    PyObject *dtype;
    PyTypeObject *number;    /* Python's own, of which NumPy makes arrays of this dtype; or NULL */
    Py_ssize_t start, count; /* where their vector begins in a slot, and its elements */
} Kind;

/* One of several arrays that are one vector, or one of each kind. */
typedef struct {
    int ndim, is_alone; /* is_alone: a long one, which is reduced by itself where it lies in the
                           shared memory on any rank */
    int kind;
    Py_ssize_t first, count; /* elements of its kind that come before, and its own */
    intptr_t shape[LEAF_NDIM_MAX];
} Leaf;

typedef struct {
    PyObject_HEAD PyObject *face;
    ChannelState *channel;
    CommunicatorState *communicator;
    PyObject *engine, *busy, *queue, *add, *told, *plain, *later, *hand_over, *interrupt, *saying,
        *begun, *work, *adopt;
    PyObject *nothing; /* stands for the result of a rank that gets nothing; else None */
    PyObject *crowd;   /* of a long vector: knows whether Python's lock has to be kept; else None */
    PyObject *structure, *leaves_type; /* of several arrays: how containers hold them, see pytree.c,
                                          and the class `Leaves`; else None */
    PyObject *make_arguments, *leaf_arguments;
    PyObject *op, *prepared_calls; /* by what it is remembered */
    Form brought, made;
    Copy puts[RANKS_MAX], takes[RANKS_MAX + 1], terms[RANKS_MAX];
    int put_count, take_count, term_count;
    Leaf *leaves; /* the arrays of which what is brought, and what is made, is the concatenation */
    int leaf_count; /* 0: it is one array */
    Kind kinds[KINDS_MAX];
    int kind_count, rider; /* the first kind that lies in slots: 1 of a long call, whose long arrays
                              are of kind 0 */
    int span_count;        /* arrays of a long call that are its vector */
    char *room;            /* where small ones are combined */
    PyObject *kept_leaves, *kept_room, *kept_kinds;
    int parts; /* the caller gets a list of so many parts of the result; 0: the result */
    uint64_t digest, detail;
    int tells; /* of blocks that others take: the check without the detail, and where long ones lie
                */
    int reads; /* and these are read in the processes of their ranks */
    Py_ssize_t ring; /* where the slots that take turns begin; 0 where there are none; -1 of a call
                        that does not look for them */
    Arithmetic how;  /* of the terms, in the slots */
    Step apply;
    int is_long, everyone; /* of a long vector: everybody ends with all of it; else what others read
                              is never written over */
    Known known[PATTERNS]; /* of a long vector: what is done, by where the vectors lie; the first
                              one brings all of them */
    int memories;          /* that these have at most, and scratch memory that they need */
    int64_t scratch_bytes;
} SlotCall;

/* Return how long an array of the caller is in the slots, where halves are float32. */
static inline Py_ssize_t in_slots(const SlotCall *self, const Form *form) {
    return self->how.half ? 2 * form->nbytes : form->nbytes;
}

/* of pytree.c */
int intern_kinds(void);
PyTypeObject *container_of(PyObject *structure);
int read_leaves(SlotCall *self, PyObject *kinds, PyObject *given);
int holds_leaves(const SlotCall *self, PyObject *value);
PyObject *leaves_of(const SlotCall *self, PyObject *value, int flags);
int are_leaves(const SlotCall *self, PyObject *arrays, int flags);
PyObject *make_leaves(const SlotCall *self);
PyObject *structure_of(const SlotCall *self, PyObject *arrays);
void find_spans(const SlotCall *self, PyObject *arrays, Span *spans);
int lie_leaves_apart(const SlotCall *self, PyObject *brought, PyObject *made);
int lies_alone(const SlotCall *self, const Span *spans);
void put_leaves(const SlotCall *self, char *slot, PyObject *arrays);
void combine_leaves(const SlotCall *self, const char *const *slots, PyObject *arrays);

/* of persistent_call.c */
int accept(const SlotCall *self, PyObject *x, PyObject *out, PyObject **brought, PyObject **goal);
int fit_still(const SlotCall *self, const Form *form, PyObject *arrays, int flags);
int are_all_put(const SlotCall *self);
int brings_nothing(const SlotCall *self);
PyObject *make_result(const SlotCall *self, PyObject *goal);
PyObject *given_of(const SlotCall *self, PyObject *made);

/* of persistent_call_exec.c */
int may_begin(const SlotCall *self);
long long take_number(const SlotCall *self, PyObject **number);
uint64_t put_own(const SlotCall *self, int side, PyObject *x);
void publish_call(const SlotCall *self, long long call, uint64_t check, uint64_t source,
                  uint64_t target);
int all_agree(const SlotCall *self, uint64_t check, int64_t patience_ns);
void finish(const SlotCall *self, int side, const char *brought, PyObject *made);
void interrupt_call(SlotCall *self, PyObject *number, PyObject *begin, PyObject *said);

/* of async_call.c */
int end_async_call(PyObject *begun, int64_t patience_ns);
PyObject *begin_slots(SlotCall *self, PyObject *x, PyObject *out, PyObject *timeout, PyObject *site,
                      PyObject *instruction);

#endif
