/* Persistent calls with async_op=True. */
#include "persistent_call.h"

typedef enum { UNPUBLISHED, OPEN, ENDED, IN_ENGINE } AsyncState;

/* Invariant: while a call is OPEN, it is the only entry of the channel's queue. No other call
 * publishes before it has ended, or is in the engine. */
typedef struct {
    PyObject_HEAD NativeCall *call;
    PyObject *number, *began, *timeout, *output, *site, *instruction, *request;
    PyObject *input, *target; /* copy of blocks that are moved, else None; `out` of the caller */
    uint64_t check;
    AsyncState state;
} AsyncCall;

/* Remove a call from the lists of open calls; keep an exception that is set. */
static void withdraw(AsyncCall *self) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    if (call_one(self->call->queue, name_remove, (PyObject *)self) < 0)
        PyErr_Clear(); /* not in the list */
    if (call_one(self->call->async_calls, name_remove, (PyObject *)self) < 0) PyErr_Clear();
    PyErr_Restore(type, error, trace);
}

/* Return whether the result of a call can be made now: the engine admits it, and its arrays have
 * not been changed. */
static int may_end(const AsyncCall *self) {
    const NativeCall *call = self->call;
    return self->state == OPEN && is_quiet(call->engine) &&
           fit_still(call, &call->output, self->output, IN_ONE_PIECE | ALIGNED | WRITEABLE) &&
           (self->input == Py_None || fits(&call->input, self->input, IN_ONE_PIECE | ALIGNED));
}

/* End a call if the others have entered, or enter while this rank spins. Return 1 if it has ended,
 * 0 if not, -1 with an exception. */
int end_async_call(PyObject *object, int64_t patience_ns) {
    AsyncCall *self = (AsyncCall *)object;
    if (self->state == ENDED) return 1;
    if (!may_end(self)) return 0;
    NativeCall *call = self->call;
    if (patience_ns == SPIN_SHORT && call->channel->patience.shares_cores) patience_ns = YIELD_NS;
    if (!all_agree(call, self->check, patience_ns)) return 0;
    const char *const input = self->input == Py_None ? NULL : ((Array *)self->input)->data;
    finish(call, (int)call->channel->side, input, self->output);
    self->state = ENDED;
    call->channel->open_call = NULL;
    Py_INCREF(object); /* the lists may hold the last reference */
    withdraw(self);
    const int recorded = record(call->add, call->info, self->number, self->began, self->site,
                                self->instruction);
    Py_DECREF(object);
    return recorded < 0 ? -1 : 1;
}

/* Wait without the GIL until the others have entered. Meanwhile another thread may end the call.
 * Return -1 with an exception. */
static int wait_async_call(const AsyncCall *self) {
    NativeCall *call = self->call;
    const int taken = self->state == OPEN ? try_acquire(call->busy) : 0;
    if (taken <= 0) return taken;
    Py_BEGIN_ALLOW_THREADS
        all_agree(call, self->check, PATIENCE_NS);
    Py_END_ALLOW_THREADS
    release(call->busy);
    return 1;
}

/* Start a call through the slots. Return its `Work`, or None to fall back. The input is copied now.
 */
static PyObject *start_small(NativeCall *self, PyObject *x, PyObject *out, PyObject *timeout,
                             PyObject *site, PyObject *instruction) {
    ChannelState *channel = self->channel;
    PyObject *input = NULL, *target = NULL, *work = NULL;
    if (self->no_result != Py_None) out = Py_None; /* this rank gets no result */
    if (!accept(self, x, out, &input, &target)) Py_RETURN_NONE;
    AsyncCall *started = new_object(async_call_type);
    if (started == NULL) goto given_up;
    int taken = 0;
    started->call = (NativeCall *)Py_NewRef((PyObject *)self);
    started->timeout = Py_NewRef(timeout);
    started->site = Py_NewRef(site);
    started->instruction = Py_NewRef(instruction);
    started->target = Py_NewRef(target);
    started->output = make_result(self, target);
    started->input = self->moves_blocks ? PyObject_CallMethodObjArgs(input, name_copy, NULL)
                                        : Py_NewRef(Py_None);
    if (started->output == NULL || started->input == NULL) goto done;
    work = PyObject_CallFunctionObjArgs(self->work, self->engine, started, NULL);
    started->began = PyLong_FromLongLong(now_ns());
    if (work == NULL || started->began == NULL) goto done;
    /* The code above may have run other threads, or the garbage collector. The code below does not:
     * so these checks stay valid. */
    if (!may_begin(self) || !fit_still(self, &self->input, input, IN_ONE_PIECE | ALIGNED))
        goto done;
    taken = 1;
    if (call_one(self->async_calls, name_append, (PyObject *)started) < 0 ||
        call_one(self->queue, name_append, (PyObject *)started) < 0)
        goto done;
    const long long call = take_number(self, &started->number);
    if (call < 0) goto done;
    const int side = (int)(channel->side ^= 1);
    const uint64_t location = put_own(self, side, input);
    started->check = self->fingerprint + (uint64_t)call * SPREAD + self->detail;
    started->state = OPEN;
    channel->open_call = (PyObject *)started;
    publish_call(self, call, started->check, started->check - self->detail, location);
done:
    if (PyErr_Occurred()) {
        Py_CLEAR(work);
        if (taken) withdraw(started);
        if (started->number == NULL &&
            PyErr_ExceptionMatches(PyExc_Exception)) { /* as in run_call */
            PyErr_Clear();
            work = Py_NewRef(Py_None);
        }
    }
    if (work != NULL && !taken) {
        Py_DECREF(work);
        work = Py_NewRef(Py_None);
    }
    Py_DECREF(started);
given_up:
    Py_XDECREF(input);
    Py_XDECREF(target);
    return work;
}

/* Start a call, in Python if it is long or unusual. Return its `Work`, or None to fall back. */
PyObject *start_call(NativeCall *self, PyObject *x, PyObject *out, PyObject *timeout,
                     PyObject *site, PyObject *instruction) {
    PyObject *work =
        self->is_long ? Py_NewRef(Py_None) : start_small(self, x, out, timeout, site, instruction);
    if (work != Py_None) return work;
    Py_DECREF(work);
    return PyObject_CallMethodObjArgs(self->call, name_start, x, out, timeout, site, instruction,
                                      NULL);
}

static PyObject *async_call_end(PyObject *object, PyObject *arguments) {
    int waits;
    if (!PyArg_ParseTuple(arguments, "p", &waits)) return NULL;
    AsyncCall *const self = (AsyncCall *)object;
    int ended = end_async_call(object, waits ? SPIN_SHORT : POLL_ONCE);
    if (ended == 0 && waits) {
        ended = wait_async_call(self);
        if (ended > 0) ended = end_async_call(object, POLL_ONCE);
    }
    if (ended < 0) return NULL;
    return ended ? result_of(self->call, self->output) : Py_NewRef(Py_None);
}

/* Let the engine continue the call. Callers hold the lock of the group, so that no other call of
 * the group can be queued before. */
static PyObject *async_call_continue(PyObject *object, PyObject *unused) {
    (void)unused;
    AsyncCall *self = (AsyncCall *)object;
    if (self->state != OPEN) Py_RETURN_NONE;
    NativeCall *call = self->call;
    self->state = IN_ENGINE;
    call->channel->open_call = NULL;
    Py_INCREF(object);
    self->request = PyObject_CallMethodObjArgs(call->call, name_continue_async, self->number,
                                               self->began, self->input, self->target, self->output,
                                               self->timeout, self->site, self->instruction, NULL);
    if (self->request == NULL) interrupt_call(call, self->number, self->began, Py_None);
    withdraw(self);
    Py_DECREF(object);
    return self->request == NULL ? NULL : Py_NewRef(Py_None);
}

static PyObject *async_call_is_over(PyObject *object, void *unused) {
    (void)unused;
    return PyBool_FromLong(((AsyncCall *)object)->state == ENDED);
}

static int async_call_clear(PyObject *object) {
    AsyncCall *self = (AsyncCall *)object;
    if (self->state == OPEN && self->call->channel != NULL) self->call->channel->open_call = NULL;
    self->state = IN_ENGINE;
    return clear_held(object);
}

static PyMemberDef async_call_members[] = {
    HELD(AsyncCall, call),
    HELD(AsyncCall, number),
    HELD(AsyncCall, began),
    HELD(AsyncCall, timeout),
    HELD(AsyncCall, output),
    HELD(AsyncCall, site),
    HELD(AsyncCall, instruction),
    HELD(AsyncCall, request),
    HELD(AsyncCall, input),
    HELD(AsyncCall, target),
    {NULL},
};

static PyGetSetDef async_call_getters[] = {
    {"is_over", async_call_is_over, NULL, NULL, NULL},
    {NULL},
};

static PyMethodDef async_call_methods[] = {
    {"end", async_call_end, METH_VARARGS,
     "Return the result if it is there, or with end(True) comes while spinning; else None."},
    {"give_to_engine", async_call_continue, METH_NOARGS,
     "Let the engine continue the call, as `request`; nothing if it has ended."},
    {NULL},
};

TYPE(AsyncCall, async_call, async_call_members,
     Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
     "A persistent call with async_op=True.", {Py_tp_getset, async_call_getters},
     {Py_tp_methods, async_call_methods}, {Py_tp_traverse, traverse_held},
     {Py_tp_clear, async_call_clear}, {Py_tp_dealloc, dealloc_held})
