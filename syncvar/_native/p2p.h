/* Messages through a box in the shared memory: `p2p.c` sends and receives them, `p2p_endpoints.c`
 * makes the ends and finds them.
 *
 * `shm/message_ring.py` says what lies where in a box. */
#ifndef SYNCVAR_MESSAGES_H
#define SYNCVAR_MESSAGES_H
#include "native.h"

#define SORTS 16 /* dtypes and shapes that are known of a pair and tag; the oldest goes */

/* What messages of one dtype and shape have in common. */
typedef struct {
    Form form;
    PyObject *shape, *told; /* NULL: not known yet */
    uint64_t what;
} Sort;

/* How far the messages of a pair and tag are; `kernel` says what its members mean. */
typedef struct {
    PyObject_HEAD PyObject *identity, *references;
    long long next_call, number;
} MessageCounter;

/* One end of a pair and tag. */
typedef struct {
    PyObject_HEAD PyObject *face;
    MessageCounter *count;
    PyObject *engine, *context, *add, *go_on, *kept, *shared;
    PyObject *busy, *box; /* locks of the pair and tag, and of this end of the box */
    long long peer, tag;  /* by which it is remembered */
    int is_retired;       /* another end counts the messages of the pair and tag now */
    PyObject *kept_sorts; /* what `sorts` refers to */
    Py_buffer memory;
    int has_memory;
    uint64_t *words; /* of the box */
    char *ring;
    uint64_t ring_bytes, entry_bytes_max, eager_bytes, identity,
        used; /* as far as it has been looked at */
    uint64_t *abort;
    Patience patience;
    Stores stores;
    int64_t patience_ns; /* so long it waits in a long message without the lock, before the engine
                            goes on */
    Sort sorts[SORTS];
    int next_sort;
} End;

PyObject *send_now(PyObject *end, PyObject *x);
PyObject *receive_now(PyObject *end, PyObject *out);

#endif
