/* Prepared writes and reads of variables: what syncvar/variables/prepared.py looks at each time, without a step of Python. */
#include "native.h"

/* What is counted of a variable; see syncvar/variables/prepared.py for this and what follows. */

static PyMemberDef tally_members[] = {
    {"writes", T_LONGLONG, offsetof(Tally, writes), 0, NULL},
    {"collectives", T_LONGLONG, offsetof(Tally, collectives), 0, NULL},
    {"added", T_LONGLONG, offsetof(Tally, added), 0, NULL},
    {"steps", T_LONGLONG, offsetof(Tally, steps), 0, NULL},
    {NULL},
};

static PyType_Slot tally_slots[] = {
    {Py_tp_members, tally_members},
    {Py_tp_dealloc, release_object},
    {Py_tp_doc, "What is counted of a variable."},
    {0, NULL}
};

static PyType_Spec tally_spec = {
    "syncvar.kernel.native.Tally", sizeof(Tally), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, tally_slots,
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

static PyType_Slot watch_slots[] = {
    {Py_tp_members, watch_members},
    {Py_tp_dealloc, release_object},
    {Py_tp_doc, "When writes are looked at."},
    {0, NULL}
};

static PyType_Spec watch_spec = {
    "syncvar.kernel.native.Watch", sizeof(Watch), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, watch_slots,
};

/* Whether a call of all replicas writes a copy, and how often it has gone to other memory. */

static PyMemberDef copied_members[] = {
    {"moves", T_LONGLONG, offsetof(Copied, moves), 0, NULL},
    {"is_being_written", T_BOOL, offsetof(Copied, is_being_written), 0, NULL},
    {NULL},
};

static PyType_Slot copied_slots[] = {
    {Py_tp_members, copied_members},
    {Py_tp_dealloc, release_object},
    {Py_tp_doc, "What is going on with a copy."},
    {0, NULL}
};

static PyType_Spec copied_spec = {
    "syncvar.kernel.native.Copied", sizeof(Copied), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, copied_slots,
};

typedef struct {
    PyObject_HEAD PyObject *call, *plain, *places, *owner, *communicator, *channel, *replica, *array_type;
    Copied *storage;
    Tally *tally;
    Watch *watch; /* NULL where nothing is compared */
    Form form;
    int is_default, is_increment;
    /* Of the storage, as long as it has not moved: it holds these. */
    long long moves;
    PyObject *array, *ground, *beneath;
    long long references;
} Write;

enum { UNDONE, DONE, DECIDE };
#define WRITES_PER_DECISION 64

static PyObject *name_stack, *name_channel, *name_array, *name_ground, *name_beneath, *name_references, *name_timeout,
    *name_uneven, *name_changes, *name_view;

static int has_form(const Write *self, PyObject *value) {
    if ((PyObject *)Py_TYPE(value) != self->array_type) return 0;
    const Array *array = (const Array *)value;
    return array->dtype == self->form.dtype && array->ndim == self->form.ndim &&
           memcmp(array->shape, self->form.shape, self->form.ndim * sizeof(intptr_t)) == 0;
}

/* Return whether each replica writes its own values where the thread is; says whether it is outside every scope. */
static int is_in_place(const Write *self, int *is_outside) {
    PyObject *stack = PyObject_GetAttr(self->places, name_stack);
    if (stack == NULL) return 0;
    const Py_ssize_t depth = PyList_Size(stack);
    PyObject *place = depth > 0 ? PyList_GetItem(stack, depth - 1) : NULL;
    *is_outside = depth == 0;
    const int good = place == NULL
                         ? depth == 0 && self->is_default
                         : PyTuple_GetItem(place, 0) == self->owner && PyTuple_GetItem(place, 1) == self->replica;
    Py_DECREF(stack);
    return good;
}

/* Return whether an attribute is this very object; an error may be set where it is not there. */
static int is_attribute(PyObject *owner, PyObject *name, const PyObject *wanted) {
    PyObject *value = PyObject_GetAttr(owner, name);
    Py_XDECREF(value); /* what is compared is an address */
    return value != NULL && value == wanted;
}

/* Learn where the copy lies; only as long as the storage has not moved what it refers to is alive. */
static int find_copy(Write *self) {
    PyObject *storage = (PyObject *)self->storage, *array = PyObject_GetAttr(storage, name_array),
             *ground = PyObject_GetAttr(storage, name_ground), *beneath = PyObject_GetAttr(storage, name_beneath),
             *references = PyObject_GetAttr(storage, name_references);
    self->references = references == NULL ? -1 : PyLong_AsLongLong(references);
    self->array = array;
    self->ground = ground;
    self->beneath = beneath;
    self->moves = self->storage->moves;
    const int good = array != NULL && ground != NULL && beneath != NULL && self->references >= 0;
    if (!good) self->moves = -1;
    Py_XDECREF(array);
    Py_XDECREF(ground);
    Py_XDECREF(beneath);
    Py_XDECREF(references);
    return good;
}

/* Return whether a view of the copy is alive, as Storage.is_exposed, which counts a reference of its own to each. */
static int is_exposed(const Write *self) {
    const long long count = (long long)(uint32_t)Py_REFCNT(self->ground) + (uint32_t)Py_REFCNT(self->beneath);
    return count + 2 > self->references;
}

/* Make a prepared call that applies its result to the copy. */
static PyObject *run_prepared(PyObject *call, PyObject *x, PyObject *array, PyObject *timeout) {
    if (Py_TYPE(call) == slot_call_type) return run_slots(call, x, array, Py_None, timeout);
    return PyObject_CallFunctionObjArgs(call, x, array, Py_None, timeout, NULL);
}

static PyObject *write_call(PyObject *object, PyObject *arguments, PyObject *keywords) {
    Write *self = (Write *)object;
    int is_outside = 0, done = UNDONE;
    PyObject *x = PyTuple_Size(arguments) == 1 ? PyTuple_GetItem(arguments, 0) : NULL, *timeout = NULL;
    if (x == NULL || keywords != NULL || !has_form(self, x)) goto plain;
    if (!is_in_place(self, &is_outside) || !is_attribute(self->communicator, name_channel, self->channel))
        goto plain;
    const int is_counted = self->watch != NULL && !self->watch->is_free;
    if (is_counted && self->tally->steps >= self->watch->until) goto plain;
    if (self->moves != self->storage->moves && !find_copy(self)) goto plain;
    timeout = PyObject_GetAttr(self->owner, name_timeout);
    if (timeout == NULL || is_exposed(self)) goto plain;
    PyObject *array = Py_NewRef(self->array);
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

static PyObject **write_references(PyObject *object, int place) {
    Write *self = (Write *)object;
    PyObject **all[] = {
        &self->call,
        &self->plain,
        &self->places,
        &self->owner,
        &self->communicator,
        &self->channel,
        &self->replica,
        &self->array_type,
        (PyObject **)&self->storage,
        (PyObject **)&self->tally,
        (PyObject **)&self->watch,
        &self->form.dtype,
    };
    return place < (int)(sizeof all / sizeof all[0]) ? all[place] : NULL;
}

static int write_traverse(PyObject *object, visitproc visit, void *arg) {
    return visit_all(object, write_references, visit, arg);
}

static int write_clear(PyObject *object) {
    clear_all(object, write_references);
    return 0;
}

static void write_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    write_clear(object);
    release_object(object);
}

static PyTypeObject *tally_type, *watch_type, *copied_type;

static PyObject *write_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *call, *plain, *places, *owner, *communicator, *channel, *replica, *array_type, *storage, *tally, *watch,
        *form;
    int is_default, is_increment;
    if (keywords != NULL ||
        !PyArg_ParseTuple(
            arguments, "OOOOOOOOO!O!OOpp", &call, &plain, &places, &owner, &communicator, &channel, &replica,
            &array_type, copied_type, &storage, tally_type, &tally, &watch, &form, &is_default, &is_increment
        ))
        return NULL;
    if (watch != Py_None && !PyObject_TypeCheck(watch, watch_type)) {
        PyErr_SetString(PyExc_TypeError, "a write is looked at by a Watch, or None");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Write *self = (Write *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->call = Py_NewRef(call);
    self->plain = Py_NewRef(plain);
    self->places = Py_NewRef(places);
    self->owner = Py_NewRef(owner);
    self->communicator = Py_NewRef(communicator);
    self->channel = Py_NewRef(channel);
    self->replica = Py_NewRef(replica);
    self->array_type = Py_NewRef(array_type);
    self->storage = (Copied *)Py_NewRef(storage);
    self->tally = (Tally *)Py_NewRef(tally);
    self->watch = watch == Py_None ? NULL : (Watch *)Py_NewRef(watch);
    self->is_default = is_default;
    self->is_increment = is_increment;
    self->moves = -1;
    if (!read_form(form, &self->form)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyType_Slot write_slots[] = {
    {Py_tp_new, write_new},
    {Py_tp_call, write_call},
    {Py_tp_dealloc, write_dealloc},
    {Py_tp_traverse, write_traverse},
    {Py_tp_clear, write_clear},
    {Py_tp_doc, "A prepared write of a variable: write(x) says what has been done."},
    {0, NULL},
};

static PyType_Spec write_spec = {
    "syncvar.kernel.native.Write", sizeof(Write), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, write_slots,
};

/* -- reads that combine the copies --------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD PyObject *call, *plain, *owner, *communicator, *channel;
    Copied *storage;
    Tally *tally;
} Read;

/* Read: the result is sealed, as a view of an array that is not writeable. */
static PyObject *read_call(PyObject *object, PyObject *arguments, PyObject *keywords) {
    Read *self = (Read *)object;
    PyObject *storage = (PyObject *)self->storage, *array = NULL, *ground = NULL, *changes = NULL, *timeout = NULL;
    if (!is_attribute(self->communicator, name_channel, self->channel) ||
        !is_attribute(self->communicator, name_uneven, Py_None))
        goto plain;
    array = PyObject_GetAttr(storage, name_array);
    ground = PyObject_GetAttr(storage, name_ground); /* as long as it is referred to, the array is not written */
    changes = PyObject_GetAttr(storage, name_changes);
    timeout = PyObject_GetAttr(self->owner, name_timeout);
    if (array == NULL || ground == NULL || changes == NULL || timeout == NULL || self->storage->is_being_written ||
        PyLong_AsLong(changes) != 0)
        goto plain;
    PyObject *made = run_slots(self->call, array, Py_None, Py_None, timeout), *shown = made;
    if (made != NULL && made != Py_None) {
        self->tally->collectives++;
        ((Array *)made)->flags &= ~WRITEABLE;
        shown = PyObject_CallMethodObjArgs(made, name_view, NULL);
        Py_DECREF(made);
    }
    Py_DECREF(array);
    Py_DECREF(ground);
    Py_DECREF(changes);
    Py_DECREF(timeout);
    return shown;
plain:
    Py_XDECREF(array);
    Py_XDECREF(ground);
    Py_XDECREF(changes);
    Py_XDECREF(timeout);
    PyErr_Clear(); /* Python will say what is wrong */
    return PyObject_Call(self->plain, arguments, keywords);
}

static PyObject **read_references(PyObject *object, int place) {
    Read *self = (Read *)object;
    PyObject **all[] = {
        &self->call, &self->plain, &self->owner, &self->communicator, &self->channel, (PyObject **)&self->storage,
        (PyObject **)&self->tally,
    };
    return place < (int)(sizeof all / sizeof all[0]) ? all[place] : NULL;
}

static int read_traverse(PyObject *object, visitproc visit, void *arg) {
    return visit_all(object, read_references, visit, arg);
}

static int read_clear(PyObject *object) {
    clear_all(object, read_references);
    return 0;
}

static void read_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    read_clear(object);
    release_object(object);
}

static PyObject *read_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *call, *plain, *owner, *communicator, *channel, *storage, *tally;
    if (keywords != NULL || !PyArg_ParseTuple(
                                arguments, "O!OOOOO!O!", slot_call_type, &call, &plain, &owner, &communicator, &channel,
                                copied_type, &storage, tally_type, &tally
                            ))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Read *self = (Read *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->call = Py_NewRef(call);
    self->plain = Py_NewRef(plain);
    self->owner = Py_NewRef(owner);
    self->communicator = Py_NewRef(communicator);
    self->channel = Py_NewRef(channel);
    self->storage = (Copied *)Py_NewRef(storage);
    self->tally = (Tally *)Py_NewRef(tally);
    return (PyObject *)self;
}

static PyType_Slot read_slots[] = {
    {Py_tp_new, read_new},
    {Py_tp_call, read_call},
    {Py_tp_dealloc, read_dealloc},
    {Py_tp_traverse, read_traverse},
    {Py_tp_clear, read_clear},
    {Py_tp_doc, "A prepared read that combines the copies of a variable: read(copy) returns None where nothing has been done."},
    {0, NULL},
};

static PyType_Spec read_spec = {
    "syncvar.kernel.native.Read", sizeof(Read), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, read_slots,
};

/* Add what prepared writes and reads are made of. */
int add_writes(PyObject *module) {
    name_stack = PyUnicode_InternFromString("stack");
    name_channel = PyUnicode_InternFromString("channel");
    name_array = PyUnicode_InternFromString("array");
    name_ground = PyUnicode_InternFromString("_ground");
    name_beneath = PyUnicode_InternFromString("_beneath");
    name_references = PyUnicode_InternFromString("_references");
    name_timeout = PyUnicode_InternFromString("timeout");
    name_uneven = PyUnicode_InternFromString("uneven");
    name_changes = PyUnicode_InternFromString("_changes");
    name_view = PyUnicode_InternFromString("view");
    if (!name_uneven || !name_changes || !name_view) return -1;
    if (!name_stack || !name_channel || !name_array || !name_ground || !name_beneath || !name_references ||
        !name_timeout)
        return -1;
    if (add_type(module, &tally_spec, "Tally", &tally_type) < 0) return -1;
    if (add_type(module, &watch_spec, "Watch", &watch_type) < 0) return -1;
    if (add_type(module, &copied_spec, "Copied", &copied_type) < 0) return -1;
    if (add_groups(module, tally_type, copied_type) < 0) return -1;
    if (add_type(module, &read_spec, "Read", NULL) < 0) return -1;
    return add_type(module, &write_spec, "Write", NULL);
}
