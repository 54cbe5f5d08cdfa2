/* The module: what it tells of itself, and its types. */
#include "native.h"

#define FORM 16 /* of what Python and this module tell each other; as in __init__.py */

/* Say where an array lies, as this module reads it; the loader compares this with what NumPy says. */
static PyObject *describe(PyObject *module, PyObject *value) {
    (void)module;
    const Array *array = (const Array *)value;
    PyObject *shape = PyTuple_New(array->ndim);
    for (int axis = 0; shape != NULL && axis < array->ndim; axis++)
        PyTuple_SetItem(shape, axis, PyLong_FromSsize_t(array->shape[axis]));
    return Py_BuildValue(
        "(KNOi)", (unsigned long long)(uintptr_t)array->data, shape, array->dtype,
        array->flags & (IN_ONE_PIECE | ALIGNED | WRITEABLE)
    );
}

/* Combine two arrays of one dtype and length into a third one by a ufunc's own loop; the loader compares the result. */
static PyObject *combine_once(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *ufunc, *left, *right, *out;
    int number;
    if (!PyArg_ParseTuple(arguments, "OiOOO", &ufunc, &number, &left, &right, &out)) return NULL;
    Step step = {NULL, NULL, NULL};
    if (!find_loop(ufunc, number, &step)) Py_RETURN_FALSE;
    const Array *made = (const Array *)out;
    combine(
        &step, ((const Array *)left)->data, ((const Array *)right)->data, made->strides[0], made->data, made->shape[0],
        made->strides[0]
    );
    Py_DECREF(step.owner);
    Py_RETURN_TRUE;
}

/* Copy the bytes of an array into another one, as to memory that others read; tests compare the two ways. */
static PyObject *copy_once(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *target, *source;
    Py_ssize_t nbytes;
    int past;
    if (!PyArg_ParseTuple(arguments, "OOnp", &target, &source, &nbytes, &past)) return NULL;
    Stores stores = {past ? SLOW_LEAST : 0, 1};
    copy_out(&stores, ((const Array *)target)->data, ((const Array *)source)->data, (size_t)nbytes);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"describe", describe, METH_O,
     "Return (address, shape, dtype, flags) of an array, as this module reads its memory."},
    {"combine_once", combine_once, METH_VARARGS,
     "Combine two flat arrays into a third one by the loop of a ufunc; False where it has none."},
    {"note_change", note_change, METH_NOARGS, "Let entrances look again of which group calls are that name none."},
    {"copy_once", copy_once, METH_VARARGS,
     "Copy so many bytes of an array into another one, as to memory that others read; past the caches where that is asked for."},
    {NULL},
};

/* Add a type to the module; `kept` is where it is kept for other types' own use. */
static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **kept) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    const int done = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    if (kept != NULL && done == 0) *kept = (PyTypeObject *)Py_NewRef(type);
    Py_XDECREF(type);
    return done;
}

static int prepare_module(PyObject *module) {
    static const struct {
        PyType_Spec *spec;
        PyTypeObject **kept;
    } types[] = {
        {&admission_state_spec, &admission_state_type}, {&communicator_state_spec, &communicator_state_type},
        {&channel_state_spec, &channel_state_type}, {&program_spec, &program_type}, {&run_spec, &run_type},
        {&slot_call_spec, &slot_call_type},         {&begun_spec, &begun_type},     {&entrance_spec, NULL},
        {&tally_spec, &tally_type},                 {&watch_spec, &watch_type},     {&copied_spec, &copied_type},
        {&write_spec, NULL},                        {&look_spec, NULL},             {&read_spec, NULL},
        {&group_spec, NULL},                        {&count_spec, &count_type},     {&end_spec, &end_type},
        {&door_spec, NULL},
    };
    choose_copy();
    if (intern_names() < 0 || PyModule_AddIntConstant(module, "FORM", FORM) < 0) return -1;
    for (size_t type = 0; type < sizeof types / sizeof *types; type++)
        if (add_type(module, types[type].spec, types[type].kept) < 0) return -1;
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, prepare_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "syncvar.kernel.native",
    "Runs prepared calls in shared memory without Python's own steps.",
    0,
    functions,
    module_slots,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit_native(void) { return PyModuleDef_Init(&definition); }
