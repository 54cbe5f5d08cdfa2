/* Endpoints of messages, and the dispatch of `send` and `recv`, which finds them in C. */
#include "p2p.h"

#define BOX_NDIM_MAX 13 /* dimensions of a cached shape */

/* Replaces `send` or `recv`. */
typedef struct {
    Face face;
    int is_sending;
} MessageEntrance;

/* -- sequence counters ------------------------------------------------------------------------- */

static PyMemberDef message_counter_members[] = {
    {"identity", T_OBJECT_EX, offsetof(MessageCounter, identity), READONLY, NULL},
    NUMBER(MessageCounter, next_call),
    {"__weaklistoffset__", T_PYSSIZET, offsetof(MessageCounter, references), READONLY, NULL},
    {NULL},
};

static PyObject *message_counter_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *identity;
    long long next_call;
    if (keywords != NULL || !PyArg_ParseTuple(arguments, "OL", &identity, &next_call)) return NULL;
    MessageCounter *self = new_object(type);
    if (self == NULL) return NULL;
    self->identity = Py_NewRef(identity);
    self->next_call = next_call;
    return (PyObject *)self;
}

static void message_counter_dealloc(PyObject *object) {
    if (((MessageCounter *)object)->references != NULL) PyObject_ClearWeakRefs(object);
    Py_CLEAR(((MessageCounter *)object)->identity);
    dealloc_object(object);
}

TYPE(MessageCounter, message_counter, message_counter_members, 0,
     "Sequence counter of a pair and tag.", {Py_tp_new, message_counter_new},
     {Py_tp_dealloc, message_counter_dealloc})

/* -- endpoints --------------------------------------------------------------------------------- */

/* remember(dtype, shape, what, info): cache a dtype and shape; `info` is the CallInfo. */
static PyObject *end_remember(PyObject *object, PyObject *arguments) {
    End *self = (End *)object;
    PyObject *dtype, *shape, *info;
    unsigned long long what;
    if (!PyArg_ParseTuple(arguments, "OO!KO", &dtype, &PyTuple_Type, &shape, &what, &info))
        return NULL;
    if (PyTuple_Size(shape) > BOX_NDIM_MAX) Py_RETURN_NONE;
    Sort made = {.shape = shape, .info = info, .what = what};
    PyObject *held =
        read_form(dtype, shape, &made.form) ? PyTuple_Pack(3, dtype, shape, info) : NULL;
    Py_DECREF(made.form.dtype); /* `held` owns it */
    int is_known = held == NULL;
    for (int which = 0; which < SORTS && !is_known; which++) {
        const Sort *one = &self->sorts[which];
        is_known = one->info != NULL && one->what == what && one->form.dtype == dtype &&
                   one->form.ndim == made.form.ndim &&
                   memcmp(one->form.shape, made.form.shape, made.form.ndim * sizeof(intptr_t)) == 0;
    }
    if (is_known) {
        Py_XDECREF(held);
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    const int place = self->next_sort++ % SORTS;
    self->sorts[place] = made;
    return PyList_SetItem(self->kept_sorts, place, held) < 0 ? NULL : Py_NewRef(Py_None);
}

/* retire(): stop sending and receiving, and leave the cache. */
static PyObject *end_retire(PyObject *object, PyObject *unused) {
    (void)unused;
    ((End *)object)->is_retired = 1;
    forget((Remembered *)object);
    Py_RETURN_NONE;
}

static int end_clear(PyObject *object) {
    End *self = (End *)object;
    forget((Remembered *)self);
    for (int which = 0; which < SORTS; which++) self->sorts[which].info = NULL;
    return clear_held(object);
}

static void end_dealloc(PyObject *object) {
    Py_buffer memory = ((End *)object)->memory;
    const int has_memory = ((End *)object)->has_memory;
    dealloc_held(object);
    if (has_memory) PyBuffer_Release(&memory);
}

/* End(memory, box, ring, ring_bytes, entry_bytes_max, eager_bytes, abort, identity, looks,
 * shares_cores, patience_ns, *, members): box, ring and abort are offsets in the memory. */
static PyObject *end_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *memory;
    unsigned long long box, ring, ring_bytes, entry_bytes_max, eager_bytes, abort_at, identity;
    int looks, shares_cores;
    long long patience_ns;
    if (!PyArg_ParseTuple(arguments, "OKKKKKKKipL", &memory, &box, &ring, &ring_bytes,
                          &entry_bytes_max, &eager_bytes, &abort_at, &identity, &looks,
                          &shares_cores, &patience_ns))
        return NULL;
    End *self = new_holding(type, keywords);
    if (self == NULL) return NULL;
    if ((self->kept_sorts = PyList_New(SORTS)) == NULL) goto failed;
    for (int which = 0; which < SORTS; which++)
        PyList_SetItem(self->kept_sorts, which, Py_NewRef(Py_None));
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0) goto failed;
    self->has_memory = 1;
    const uint64_t whole = (uint64_t)self->memory.len;
    if (Py_TYPE((PyObject *)self->count) != message_counter_type ||
        !PyObject_TypeCheck((PyObject *)self->stream, communicator_state_type) || ring_bytes == 0 ||
        ring_bytes % LINE || ring % LINE || box % LINE || abort_at % 8 || ring_bytes > whole ||
        ring > whole - ring_bytes || box > whole - 4 * LINE || abort_at > whole - 8 ||
        entry_bytes_max > ring_bytes) {
        PyErr_SetString(PyExc_ValueError, "the message ring is not within this memory");
        goto failed;
    }
    char *start = self->memory.buf;
    self->words = (uint64_t *)(start + box);
    self->ring = start + ring;
    self->abort = (uint64_t *)(start + abort_at);
    self->ring_bytes = ring_bytes;
    self->entry_bytes_max = entry_bytes_max;
    self->eager_bytes = eager_bytes;
    self->identity = identity;
    self->used = seen(self->words + USED);
    self->patience.looks = looks;
    self->patience.shares_cores = shares_cores;
    self->patience_ns = patience_ns;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef end_methods[] = {
    {"send", send_now, METH_O,
     "send(x): True if the message is in the ring, False if nothing was done"},
    {"receive", receive_now, METH_O, "receive(out): the message, or None if nothing was done"},
    {"remember", end_remember, METH_VARARGS, "remember(dtype, shape, what, info)"},
    {"retire", end_retire, METH_NOARGS, "retire(): stop sending and receiving"},
    {NULL},
};

static PyMemberDef end_members[] = {
    HELD(End, stream),
    HELD(End, count),
    HELD(End, engine),
    HELD(End, context),
    HELD(End, add),
    HELD(End, go_on),
    HELD(End, busy),
    HELD(End, box),
    HELD(End, kept),
    HELD(End, shared),
    HOLDS(End, face, "_face"),
    HOLDS(End, kept_sorts, "_sorts"),
    {NULL},
};

TYPE(End, end, end_members, Py_TPFLAGS_HAVE_GC, "Endpoint of the messages of a pair and tag.",
     {Py_tp_new, end_new}, {Py_tp_methods, end_methods}, {Py_tp_traverse, traverse_held},
     {Py_tp_clear, end_clear}, {Py_tp_dealloc, end_dealloc})

/* -- dispatch of send and recv ----------------------------------------------------------------- */

/* Return the cache entry of a peer and tag. */
static Remembered **place_of(MessageEntrance *self, long long peer, long long tag) {
    return self->face.remembered +
           ((unsigned long long)peer * 31 + (unsigned long long)tag) % REMEMBERED;
}

/* Return a number, or -1 if the value is not a plain integer of this range. */
static long long plain_number(PyObject *value) {
    if (Py_TYPE(value) != &PyLong_Type) return -1;
    const long long number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred()) PyErr_Clear();
    return number;
}

/* Return whether an endpoint belongs to this thread's world, outside a block of sv.uneven. An
 * endpoint of a job that this process has left refuses calls by itself. */
static int is_current(const MessageEntrance *self, const End *end) {
    const int same = peek(self->face.state, name_is_bound) == Py_False &&
                     peek(end->context, name_uneven) == Py_None;
    if (PyErr_Occurred()) PyErr_Clear();
    return same;
}

/* Return the result of the endpoint; None or False if the function has to be called; NULL with an
 * exception. */
static PyObject *through_end(MessageEntrance *self, PyObject *const *arguments, Py_ssize_t given,
                             PyObject *names) {
    const Py_ssize_t positions = self->is_sending ? 2 : 1,
                     named = names == NULL ? 0 : PyTuple_Size(names);
    PyObject *out = Py_None;
    long long tag = 0;
    if (given != positions) Py_RETURN_NONE;
    for (Py_ssize_t place = 0; place < named; place++) {
        PyObject *name = PyTuple_GetItem(names, place), *value = arguments[given + place];
        if (name == name_tag)
            tag = plain_number(value);
        else if (name == name_out && !self->is_sending)
            out = value;
        else
            Py_RETURN_NONE;
    }
    const long long peer = plain_number(arguments[positions - 1]);
    if (peer < 0 || tag < 0) Py_RETURN_NONE;
    End *end = (End *)*place_of(self, peer, tag);
    if (end == NULL || end->peer != peer || end->tag != tag || !is_current(self, end))
        Py_RETURN_NONE;
    Py_INCREF((PyObject *)end);
    PyObject *made = self->is_sending ? send_now((PyObject *)end, arguments[0])
                                      : receive_now((PyObject *)end, out);
    Py_DECREF((PyObject *)end);
    return made;
}

static PyObject *message_entrance_call(PyObject *object, PyObject *const *arguments, size_t flagged,
                                       PyObject *names) {
    MessageEntrance *self = (MessageEntrance *)object;
    const Py_ssize_t given = GIVEN(flagged);
    PyObject *made = through_end(self, arguments, given, names);
    if (made == Py_True) {
        Py_DECREF(made);
        Py_RETURN_NONE;
    }
    if (made != Py_None && made != Py_False) return made;
    Py_DECREF(made);
    return call_function(self->face.function, arguments, given, names);
}

/* remember(end, peer, tag): cache the endpoint of a peer and tag in the world. */
static PyObject *message_entrance_remember(PyObject *object, PyObject *arguments) {
    MessageEntrance *self = (MessageEntrance *)object;
    PyObject *end;
    long long peer, tag;
    if (!PyArg_ParseTuple(arguments, "OLL", &end, &peer, &tag)) return NULL;
    if (Py_TYPE(end) == end_type && ((End *)end)->face == NULL && !((End *)end)->is_retired) {
        ((End *)end)->peer = peer;
        ((End *)end)->tag = tag;
        remember(&self->face, place_of(self, peer, tag), (Remembered *)end);
    }
    Py_RETURN_NONE;
}

/* MessageEntrance(is_sending, *, members). */
static PyObject *message_entrance_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    int is_sending;
    if (!PyArg_ParseTuple(arguments, "p", &is_sending)) return NULL;
    MessageEntrance *self = new_holding(type, keywords);
    if (self == NULL) return NULL;
    self->is_sending = is_sending;
    self->face.vectorcall = message_entrance_call;
    return (PyObject *)self;
}

static PyMethodDef message_entrance_methods[] = {
    {"remember", message_entrance_remember, METH_VARARGS, "remember(end, peer, tag)"},
    FACE_METHODS,
    {NULL},
};

static PyMemberDef message_entrance_members[] = {HOLDS(MessageEntrance, face.function, "function"),
                                                 HOLDS(MessageEntrance, face.state, "state"),
                                                 CALLED_BY(MessageEntrance),
                                                 {NULL}};

/* Replaces send or recv: makes messages of the world in C, and calls the function for all others.
 */
TYPE(MessageEntrance, message_entrance, message_entrance_members,
     Py_TPFLAGS_HAVE_GC | HAS_VECTORCALL, NULL, /* `__doc__` is the function's */
     {Py_tp_new, message_entrance_new}, {Py_tp_methods, message_entrance_methods}, FACE, HOLDING)
