/* Several variables that are written together: what is looked at and brought together for each of them. See
 * syncvar/variables/side_by_side.py, which does the same in Python.
 */
#include "native.h"

/* A variable: where its value is brought to, and what its storage held when the copies were laid side by side. */
typedef struct {
    Py_ssize_t nbytes;
    long long moves, references;
    PyObject *ground, *beneath; /* the storage's, as long as it has not moved */
} Member;

typedef struct {
    PyObject_HEAD PyObject *variables, *storages, *tallies, *parts, *array_type;
    Member *members;
    Py_ssize_t count;
} Group;

static PyTypeObject *tally_kind, *copied_kind;
static PyObject *ground_name, *beneath_name, *references_name;

static Copied *storage_of(const Group *self, Py_ssize_t place) { return (Copied *)PyTuple_GetItem(self->storages, place); }

/* Bring the values of a list of (variable, value) together; False where one of the pairs is unusual. */
static PyObject *group_load(PyObject *object, PyObject *pairs) {
    Group *self = (Group *)object;
    const int flags = IN_ONE_PIECE | ALIGNED;
    int good = PyList_CheckExact(pairs) && PyList_Size(pairs) == self->count;
    for (Py_ssize_t place = 0; good && place < self->count; place++) {
        PyObject *pair = PyList_GetItem(pairs, place), *part = PyTuple_GetItem(self->parts, place);
        good = PyTuple_CheckExact(pair) && PyTuple_Size(pair) == 2 &&
               PyWeakref_GetObject(PyTuple_GetItem(self->variables, place)) == PyTuple_GetItem(pair, 0) &&
               (PyObject *)Py_TYPE(PyTuple_GetItem(pair, 1)) == self->array_type;
        if (!good) break;
        const Array *from = (const Array *)PyTuple_GetItem(pair, 1), *to = (const Array *)part;
        good = from->dtype == to->dtype && from->ndim == to->ndim && (from->flags & flags) == flags &&
               memcmp(from->shape, to->shape, to->ndim * sizeof(intptr_t)) == 0;
        if (good) memcpy(to->data, from->data, self->members[place].nbytes);
    }
    PyErr_Clear();
    return PyBool_FromLong(good);
}

/* Take note that the copies lie side by side now. */
static PyObject *group_lay(PyObject *object, PyObject *unused) {
    (void)unused;
    Group *self = (Group *)object;
    for (Py_ssize_t place = 0; place < self->count; place++) {
        Member *member = &self->members[place];
        PyObject *storage = PyTuple_GetItem(self->storages, place), *ground = PyObject_GetAttr(storage, ground_name),
                 *beneath = PyObject_GetAttr(storage, beneath_name),
                 *references = PyObject_GetAttr(storage, references_name);
        member->references = references == NULL ? -1 : PyLong_AsLongLong(references);
        member->ground = ground;
        member->beneath = beneath;
        member->moves = ground == NULL || beneath == NULL ? -1 : ((Copied *)storage)->moves;
        Py_XDECREF(ground);
        Py_XDECREF(beneath);
        Py_XDECREF(references);
        if (PyErr_Occurred()) return NULL;
    }
    Py_RETURN_NONE;
}

static void mark(const Group *self, char is_being_written) {
    for (Py_ssize_t place = 0; place < self->count; place++) storage_of(self, place)->is_being_written = is_being_written;
}

/* Mark the copies as being written; False, and no mark, where they do not lie side by side or a view of one is alive. */
static PyObject *group_begin(PyObject *object, PyObject *unused) {
    (void)unused;
    const Group *self = (const Group *)object;
    mark(self, 1);
    int good = 1;
    for (Py_ssize_t place = 0; good && place < self->count; place++) {
        const Member *member = &self->members[place];
        good = member->moves == storage_of(self, place)->moves &&
               (long long)(uint32_t)Py_REFCNT(member->ground) + (uint32_t)Py_REFCNT(member->beneath) + 2 <= member->references;
    }
    if (!good) mark(self, 0);
    return PyBool_FromLong(good);
}

/* Take the marks off, and count what has been done. */
static PyObject *group_end(PyObject *object, PyObject *is_done) {
    const Group *self = (const Group *)object;
    mark(self, 0);
    for (Py_ssize_t place = 0; is_done == Py_True && place < self->count; place++) {
        Tally *tally = (Tally *)PyTuple_GetItem(self->tallies, place);
        tally->writes++;
        tally->collectives++;
    }
    Py_RETURN_NONE;
}

static PyObject **group_references(PyObject *object, int place) {
    Group *self = (Group *)object;
    PyObject **all[] = {&self->variables, &self->storages, &self->tallies, &self->parts, &self->array_type};
    return place < (int)(sizeof all / sizeof all[0]) ? all[place] : NULL;
}

static int group_traverse(PyObject *object, visitproc visit, void *arg) {
    return visit_all(object, group_references, visit, arg);
}

static int group_clear(PyObject *object) {
    ((Group *)object)->count = 0;
    clear_all(object, group_references);
    return 0;
}

static void group_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    group_clear(object);
    PyMem_Free(((Group *)object)->members);
    release_object(object);
}

/* Group(variables, storages, tallies, parts, nbytes, array_type): tuples of one length; the first of weak references. */
static PyObject *group_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *tuples[5], *array_type;
    if (keywords != NULL || !PyArg_ParseTuple(
                                arguments, "O!O!O!O!O!O", &PyTuple_Type, &tuples[0], &PyTuple_Type, &tuples[1],
                                &PyTuple_Type, &tuples[2], &PyTuple_Type, &tuples[3], &PyTuple_Type, &tuples[4],
                                &array_type
                            ))
        return NULL;
    const Py_ssize_t count = PyTuple_Size(tuples[0]);
    int good = 1;
    for (int tuple = 1; tuple < 5; tuple++) good = good && PyTuple_Size(tuples[tuple]) == count;
    for (Py_ssize_t place = 0; good && place < count; place++)
        good = PyObject_TypeCheck(PyTuple_GetItem(tuples[1], place), copied_kind) &&
               PyObject_TypeCheck(PyTuple_GetItem(tuples[2], place), tally_kind) &&
               (PyObject *)Py_TYPE(PyTuple_GetItem(tuples[3], place)) == array_type;
    if (!good) {
        PyErr_SetString(PyExc_TypeError, "a group is made of as many references, storages, tallies, arrays and numbers");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Group *self = (Group *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->variables = Py_NewRef(tuples[0]);
    self->storages = Py_NewRef(tuples[1]);
    self->tallies = Py_NewRef(tuples[2]);
    self->parts = Py_NewRef(tuples[3]);
    self->array_type = Py_NewRef(array_type);
    self->members = PyMem_Calloc(count, sizeof(Member));
    if (self->members == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->count = count;
    for (Py_ssize_t place = 0; place < count; place++) {
        self->members[place].moves = -1;
        self->members[place].nbytes = PyLong_AsSsize_t(PyTuple_GetItem(tuples[4], place));
    }
    if (PyErr_Occurred()) Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMethodDef group_methods[] = {
    {"load", group_load, METH_O, "Bring the values of (variable, value) pairs together; False where one is unusual."},
    {"lay", group_lay, METH_NOARGS, "Take note that the copies lie side by side."},
    {"begin", group_begin, METH_NOARGS, "Mark the copies as being written; False where that cannot be done in place."},
    {"end", group_end, METH_O, "Take the marks off, and count what has been done."},
    {NULL},
};

static PyType_Slot group_slots[] = {
    {Py_tp_new, group_new},           {Py_tp_methods, group_methods}, {Py_tp_dealloc, group_dealloc},
    {Py_tp_traverse, group_traverse}, {Py_tp_clear, group_clear},     {Py_tp_doc, "Variables that are written together."},
    {0, NULL},
};

static PyType_Spec group_spec = {
    "syncvar.kernel.native.Group", sizeof(Group), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, group_slots,
};

/* Add what grouped writes are made of. */
int add_groups(PyObject *module, PyTypeObject *tally, PyTypeObject *copied) {
    tally_kind = tally;
    copied_kind = copied;
    ground_name = PyUnicode_InternFromString("_ground");
    beneath_name = PyUnicode_InternFromString("_beneath");
    references_name = PyUnicode_InternFromString("_references");
    if (!ground_name || !beneath_name || !references_name) return -1;
    return add_type(module, &group_spec, "Group", NULL);
}
