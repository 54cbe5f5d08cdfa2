/* Prepared writes and reads of variables: what syncvar/variables/prepared.py looks at each time, without a step of Python. */
#include "native.h"

/* -- what is known of a variable ----------------------------------------------------------------------------------- */

PyTypeObject *tally_type, *watch_type, *copied_type;

static PyMemberDef tally_members[] = {
    {"writes", T_LONGLONG, offsetof(Tally, writes), 0, NULL},
    {"collectives", T_LONGLONG, offsetof(Tally, collectives), 0, NULL},
    {"added", T_LONGLONG, offsetof(Tally, added), 0, NULL},
    {"steps", T_LONGLONG, offsetof(Tally, steps), 0, NULL},
    {"reads", T_LONGLONG, offsetof(Tally, reads), 0, NULL},
    {"turned", T_LONGLONG, offsetof(Tally, turned), 0, NULL},
    {"turns", T_LONGLONG, offsetof(Tally, turns), 0, NULL},
    {NULL},
};

/* Whether writes have to be counted, and up to which number they pass unseen. */
typedef struct {
    PyObject_HEAD long long until;
    char is_free;
} Watch;

static PyMemberDef watch_members[] = {
    {"until", T_LONGLONG, offsetof(Watch, until), 0, NULL},
    {"is_free", T_BOOL, offsetof(Watch, is_free), 0, NULL},
    {NULL},
};

static PyMemberDef copied_members[] = {
    {"moves", T_LONGLONG, offsetof(Copied, moves), 0, NULL},
    {"changes", T_LONGLONG, offsetof(Copied, changes), 0, NULL},
    {"is_being_written", T_BOOL, offsetof(Copied, is_being_written), 0, NULL},
    {NULL},
};

#define NUMBERS(MEMBERS, TOLD) {{Py_tp_members, MEMBERS}, {Py_tp_dealloc, dealloc_object}, {Py_tp_doc, TOLD}, {0, NULL}}
static PyType_Slot tally_slots[] = NUMBERS(tally_members, "What is counted of a variable."),
                   watch_slots[] = NUMBERS(watch_members, "When writes are looked at."),
                   copied_slots[] = NUMBERS(copied_members, "What is going on with a copy.");

PyType_Spec tally_spec = TYPE_OF(Tally, Py_TPFLAGS_BASETYPE, tally_slots),
            watch_spec = TYPE_OF(Watch, Py_TPFLAGS_BASETYPE, watch_slots),
            copied_spec = TYPE_OF(Copied, Py_TPFLAGS_BASETYPE, copied_slots);

/* Learn where the copy lies that a storage has now; 0 with an error. */
int look_at_copy(Laid *laid, Copied *storage) {
    PyObject *references = PyObject_GetAttr((PyObject *)storage, name__references);
    laid->array = peek((PyObject *)storage, name_array);
    laid->ground = peek((PyObject *)storage, name__ground);
    laid->beneath = peek((PyObject *)storage, name__beneath);
    laid->references = references == NULL ? -1 : PyLong_AsLongLong(references);
    Py_XDECREF(references);
    const int good = laid->array != NULL && laid->ground != NULL && laid->beneath != NULL && laid->references >= 0;
    laid->moves = good ? storage->moves : -1;
    return good;
}

/* Return whether a view of the copy is alive, as Storage.is_exposed, which counts a reference of its own to each. */
int is_exposed(const Laid *laid) {
    const long long count = (long long)(uint32_t)Py_REFCNT(laid->ground) + (uint32_t)Py_REFCNT(laid->beneath);
    return count + 2 > laid->references;
}

/* Return whether a copy is written at this moment: what is read then is another copy, that Python makes. */
static int is_changing(const Copied *storage) { return storage->is_being_written || storage->changes != 0; }

/* Return whether an object is what its members have to be, or set an error. */
static int are_known(Copied *storage, Tally *tally) {
    if (PyObject_TypeCheck((PyObject *)storage, copied_type) && PyObject_TypeCheck((PyObject *)tally, tally_type)) return 1;
    PyErr_SetString(PyExc_TypeError, "what is known of a variable is a Copied and a Tally");
    return 0;
}

/* -- places -------------------------------------------------------------------------------------------------------- */

/* The stacks of places, and of them that of the thread that has asked last: a thread has the same one as long as it lives, and
 * no other thread ever has its number. */
typedef struct {
    PyObject *places, *stack;
    uint64_t thread;
} Stacks;

/* Find the strategy and the context of the innermost place where the thread is, both NULL outside every scope; the place holds
 * them. Returns 0 with an error. */
static int find_place(Stacks *stacks, PyObject **owner, PyObject **context) {
    const uint64_t thread = PyThreadState_GetID(PyThreadState_Get());
    if (stacks->stack == NULL || stacks->thread != thread) {
        PyObject *found = PyObject_GetAttr(stacks->places, name_stack), *before = stacks->stack;
        if (found == NULL) return 0;
        stacks->stack = found;
        stacks->thread = thread;
        Py_XDECREF(before);
    }
    const Py_ssize_t depth = PyList_Size(stacks->stack);
    PyObject *place = depth > 0 ? PyList_GetItem(stacks->stack, depth - 1) : NULL;
    *owner = place == NULL ? NULL : PyTuple_GetItem(place, 0);
    *context = place == NULL ? NULL : PyTuple_GetItem(place, 1);
    return depth == 0 || (*owner != NULL && *context != NULL);
}

/* -- writes -------------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD PyObject *call, *plain, *owner, *communicator, *channel, *replica, *array_type, *watch;
    Stacks stacks;
    Copied *storage;
    Tally *tally;
    Form form;
    int is_default, is_increment;
    Laid laid;
} Write;

enum { UNDONE, DONE, DECIDE };
#define WRITES_PER_DECISION 64

/* Return whether each replica writes its own values where the thread is; says whether it is outside every scope. */
static int is_in_place(Write *self, int *is_outside) {
    PyObject *owner, *context;
    if (!find_place(&self->stacks, &owner, &context)) return 0;
    *is_outside = owner == NULL;
    return owner == NULL ? self->is_default : owner == self->owner && context == self->replica;
}

/* Make a prepared call that applies its result to the copy. */
static PyObject *run_prepared(PyObject *call, PyObject *x, PyObject *array, PyObject *timeout) {
    if (Py_TYPE(call) == slot_call_type) return run_slots(call, x, array, Py_None, timeout);
    return PyObject_CallFunctionObjArgs(call, x, array, Py_None, timeout, NULL);
}

static PyObject *write_call(PyObject *object, PyObject *arguments, PyObject *keywords) {
    Write *self = (Write *)object;
    const Watch *watch = (Watch *)self->watch;
    int is_outside = 0, done = UNDONE;
    PyObject *x = PyTuple_Size(arguments) == 1 ? PyTuple_GetItem(arguments, 0) : NULL, *timeout = NULL;
    if (x == NULL || keywords != NULL || !fits(&self->form, self->array_type, x, 0)) goto plain;
    if (!is_in_place(self, &is_outside) || peek(self->communicator, name_channel) != self->channel) goto plain;
    const int is_counted = self->watch != Py_None && !watch->is_free;
    if (is_counted && self->tally->steps >= watch->until) goto plain;
    if (self->laid.moves != self->storage->moves && !look_at_copy(&self->laid, self->storage)) goto plain;
    timeout = PyObject_GetAttr(self->owner, name_timeout);
    if (timeout == NULL || is_exposed(&self->laid)) goto plain;
    PyObject *array = Py_NewRef(self->laid.array);
    self->tally->steps += is_counted;
    self->storage->is_being_written = 1;
    PyObject *result = run_prepared(self->call, x, array, timeout);
    self->storage->is_being_written = 0;
    Py_DECREF(array);
    Py_DECREF(timeout);
    if (result == NULL) return NULL;
    if (result == Py_None) {
        self->tally->steps -= is_counted;
    } else {
        self->tally->writes++;
        self->tally->collectives++;
        done = DONE;
        if (self->is_increment && ++self->tally->added % WRITES_PER_DECISION == 0 && is_outside) done = DECIDE;
    }
    Py_DECREF(result);
    return PyLong_FromLong(done);
plain:
    Py_XDECREF(timeout);
    PyErr_Clear(); /* Python will say what is wrong */
    return PyObject_Call(self->plain, arguments, keywords);
}

/* Write(dtype, shape, is_default, is_increment, *, what it holds). */
static PyObject *write_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *dtype, *shape;
    int is_default, is_increment;
    if (!PyArg_ParseTuple(arguments, "OOpp", &dtype, &shape, &is_default, &is_increment)) return NULL;
    Write *self = new_holding(type, keywords);
    if (self == NULL) return NULL;
    self->is_default = is_default;
    self->is_increment = is_increment;
    self->laid.moves = -1;
    if (self->watch != Py_None && !PyObject_TypeCheck(self->watch, watch_type))
        PyErr_SetString(PyExc_TypeError, "a write is looked at by a Watch, or None");
    else if (are_known(self->storage, self->tally) && read_form(dtype, shape, &self->form))
        return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static PyMemberDef write_members[] = {
    HELD(Write, call), HELD(Write, plain), HOLDS(Write, stacks.places, "places"), HOLDS(Write, stacks.stack, "_stack"),
    HELD(Write, owner), HELD(Write, communicator), HELD(Write, channel), HELD(Write, replica), HELD(Write, array_type),
    HELD(Write, watch), HELD(Write, storage), HELD(Write, tally), HOLDS(Write, form.dtype, "_dtype"), {NULL},
};

static PyType_Slot write_slots[] = {
    {Py_tp_new, write_new},
    {Py_tp_call, write_call},
    {Py_tp_members, write_members},
    HOLDING,
    {Py_tp_doc, "A prepared write of a variable: write(x) says what has been done."},
    {0, NULL},
};

PyType_Spec write_spec = TYPE_OF(Write, Py_TPFLAGS_HAVE_GC, write_slots);

/* -- reads of this replica's copy ---------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD PyObject *plain, *owner;
    Stacks stacks;
    Copied *storage;
    Tally *tally;
    int is_default;
} Look;

/* Look: a view that is there already is valid until the next write, a new one for ever. Whoever writes says so before it looks
 * whether a new one is there; so that is made first. */
static PyObject *look_call(PyObject *object, PyObject *arguments, PyObject *keywords) {
    Look *self = (Look *)object;
    PyObject *storage = (PyObject *)self->storage, *owner, *context, *view = NULL,
             *copy = PyTuple_Size(arguments) == 1 && keywords == NULL ? PyTuple_GetItem(arguments, 0) : NULL;
    int usual = (copy == Py_True || copy == Py_False) && find_place(&self->stacks, &owner, &context) &&
                (owner == NULL || owner == self->owner || self->is_default);
    if (usual && copy == Py_False) {
        view = PyObject_GetAttr(storage, name_view);
    } else if (usual) {
        PyObject *shown = PyObject_GetAttr(storage, name__shown);
        view = shown == NULL ? NULL : PyObject_GetItem(shown, Py_Ellipsis);
        Py_XDECREF(shown);
        if (is_changing(self->storage)) Py_CLEAR(view);
    }
    if (view == NULL) {
        PyErr_Clear(); /* Python will say what is wrong */
        return PyObject_Call(self->plain, arguments, keywords);
    }
    self->tally->turns += self->tally->added != self->tally->turned;
    self->tally->turned = self->tally->added;
    self->tally->reads++;
    return view;
}

/* Look(is_default, *, what it holds). */
static PyObject *look_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    int is_default;
    if (!PyArg_ParseTuple(arguments, "p", &is_default)) return NULL;
    Look *self = new_holding(type, keywords);
    if (self == NULL) return NULL;
    self->is_default = is_default;
    if (are_known(self->storage, self->tally)) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static PyMemberDef look_members[] = {
    HELD(Look, plain), HELD(Look, owner), HOLDS(Look, stacks.places, "places"), HOLDS(Look, stacks.stack, "_stack"),
    HELD(Look, storage), HELD(Look, tally), {NULL},
};

static PyType_Slot look_slots[] = {
    {Py_tp_new, look_new},
    {Py_tp_call, look_call},
    {Py_tp_members, look_members},
    HOLDING,
    {Py_tp_doc, "A prepared read of this replica's copy: look(copy) returns None where nothing has been done."},
    {0, NULL},
};

PyType_Spec look_spec = TYPE_OF(Look, Py_TPFLAGS_HAVE_GC, look_slots);

/* -- reads that combine the copies --------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD PyObject *call, *plain, *owner, *communicator, *channel, *replica;
    Stacks stacks; /* None where it has been found out already that the read is one of all replicas */
    Copied *storage;
    Tally *tally;
} Read;

/* Return whether the thread is where a read is one of all replicas: outside every scope, or in the strategy's own but for `run`. */
static int is_read_of_all(Read *self) {
    PyObject *owner, *context;
    if (self->stacks.places == Py_None) return 1;
    return find_place(&self->stacks, &owner, &context) && (owner == NULL || (owner == self->owner && context != self->replica));
}

/* Read: the result is sealed, as a view of an array that is not writeable. */
static PyObject *read_call(PyObject *object, PyObject *arguments, PyObject *keywords) {
    Read *self = (Read *)object;
    PyObject *storage = (PyObject *)self->storage, *held[3] = {NULL}, *made = NULL; /* array, ground, timeout */
    int usual = is_read_of_all(self) && peek(self->communicator, name_channel) == self->channel &&
                peek(self->communicator, name_uneven) == Py_None;
    if (usual) {
        held[0] = PyObject_GetAttr(storage, name_array);
        held[1] = PyObject_GetAttr(storage, name__ground); /* as long as it is referred to, the array is not written */
        held[2] = PyObject_GetAttr(self->owner, name_timeout);
        usual = held[0] != NULL && held[1] != NULL && held[2] != NULL && !is_changing(self->storage);
    }
    if (usual) made = run_slots(self->call, held[0], Py_None, Py_None, held[2]);
    for (int which = 0; which < 3; which++) Py_XDECREF(held[which]);
    if (!usual) {
        PyErr_Clear(); /* Python will say what is wrong */
        return PyObject_Call(self->plain, arguments, keywords);
    }
    if (made == NULL || made == Py_None) return made;
    self->tally->collectives++;
    self->tally->reads += self->stacks.places != Py_None;
    ((Array *)made)->flags &= ~WRITEABLE;
    PyObject *shown = PyObject_CallMethodObjArgs(made, name_view, NULL);
    Py_DECREF(made);
    return shown;
}

/* Read(*, what it holds). */
static PyObject *read_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    Read *self = PyArg_ParseTuple(arguments, "") ? new_holding(type, keywords) : NULL;
    if (self == NULL) return NULL;
    if (Py_TYPE(self->call) != slot_call_type)
        PyErr_SetString(PyExc_TypeError, "a prepared read makes a SlotCall");
    else if (are_known(self->storage, self->tally))
        return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static PyMemberDef read_members[] = {
    HELD(Read, call), HELD(Read, plain), HELD(Read, owner), HELD(Read, communicator), HELD(Read, channel), HELD(Read, replica),
    HOLDS(Read, stacks.places, "places"), HOLDS(Read, stacks.stack, "_stack"),
    HELD(Read, storage), HELD(Read, tally), {NULL},
};

static PyType_Slot read_slots[] = {
    {Py_tp_new, read_new},
    {Py_tp_call, read_call},
    {Py_tp_members, read_members},
    HOLDING,
    {Py_tp_doc, "A prepared read that combines the copies of a variable: read(copy) returns None where nothing has been done."},
    {0, NULL},
};

PyType_Spec read_spec = TYPE_OF(Read, Py_TPFLAGS_HAVE_GC, read_slots);
