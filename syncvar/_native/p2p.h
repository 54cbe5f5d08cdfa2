/* Messages through a ring in shared memory: `p2p.c` sends and receives them, `p2p_endpoints.c`
 * builds the endpoints and finds them.
 *
 * `shm/message_ring.py` explains the layout of a ring. */
#ifndef SYNCVAR_MESSAGES_H
#define SYNCVAR_MESSAGES_H
#include "native.h"

#define SORTS 16 /* cached (dtype, shape) of a pair and tag; a new one replaces the oldest */

/* Messages of one dtype and shape. */
typedef struct {
    Form form;
    PyObject *shape, *info; /* info: CallInfo; NULL: an empty entry */
    uint64_t what;
} Sort;

/* Counts the calls of a pair and tag that are over; see __init__.py. */
typedef struct {
    PyObject_HEAD PyObject *identity, *references;
    long long next_call;
} MessageCounter;

/* Endpoint of a pair and tag. */
typedef struct {
    PyObject_HEAD PyObject *face;
    CommunicatorState *stream; /* has the number of the next message */
    MessageCounter *count;
    PyObject *engine, *context, *add, *go_on, *kept, *shared;
    PyObject *busy, *box; /* locks of the pair and tag, and of this side of the ring */
    long long peer, tag;  /* its cache key */
    int is_retired;       /* another endpoint counts the messages now */
    PyObject *kept_sorts; /* owner of the objects in `sorts` */
    Py_buffer memory;
    int has_memory;
    uint64_t *words; /* header of the ring */
    char *ring;
    uint64_t ring_bytes, entry_bytes_max, eager_bytes, identity, used; /* last seen value of USED */
    uint64_t *abort;
    Patience patience;
    Stores stores;
    int64_t patience_ns; /* longest wait without the GIL in a long message, before the engine
                            continues */
    Sort sorts[SORTS];
    int next_sort;
} End;

PyObject *send_now(PyObject *end, PyObject *x);
PyObject *receive_now(PyObject *end, PyObject *out);

#endif
