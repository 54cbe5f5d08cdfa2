/* The module: self-checks and types. */
#include "persistent_call.h"

/* Describe an array as this module reads its memory; __init__.py compares this with NumPy. */
static PyObject *describe(PyObject *module, PyObject *value) {
    (void)module;
    const Array *array = (const Array *)value;
    PyObject *shape = PyTuple_New(array->ndim);
    for (int axis = 0; shape != NULL && axis < array->ndim; axis++)
        PyTuple_SetItem(shape, axis, PyLong_FromSsize_t(array->shape[axis]));
    return Py_BuildValue("(KNOi)", (unsigned long long)(uintptr_t)array->data, shape, array->dtype,
                         array->flags & (IN_ONE_PIECE | ALIGNED | WRITEABLE));
}

/* Combine two arrays into a third one by the loop of a ufunc; __init__.py compares the result. */
static PyObject *combine_once(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *ufunc, *left, *right, *out;
    int number;
    if (!PyArg_ParseTuple(arguments, "OiOOO", &ufunc, &number, &left, &right, &out)) return NULL;
    Step step = {NULL, NULL, NULL};
    if (!find_loop(ufunc, number, &step)) Py_RETURN_FALSE;
    const Array *made = (const Array *)out;
    combine(&step, ((const Array *)left)->data, ((const Array *)right)->data, made->strides[0],
            made->data, made->shape[0], made->strides[0]);
    Py_DECREF(step.owner);
    Py_RETURN_TRUE;
}

/* Copy the bytes of an array into another one, for tests. Way 0: to memory that others read, by
 * ordinary stores; 1: the same bypassing the caches; 2: to memory that only this rank reads. */
static PyObject *copy_once(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *target, *source;
    Py_ssize_t nbytes;
    int way;
    if (!PyArg_ParseTuple(arguments, "OOni", &target, &source, &nbytes, &way)) return NULL;
    Stores stores = {.has_begun = 1, .passes = way == 1, .left = 2};
    char *to = ((const Array *)target)->data, *from = ((const Array *)source)->data;
    if (way == 2)
        copy_in(to, from, (size_t)nbytes);
    else
        copy_out(&stores, to, from, (size_t)nbytes);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"describe", describe, METH_O,
     "Return (address, shape, dtype, flags) of an array, as this module reads its memory."},
    {"combine_once", combine_once, METH_VARARGS,
     "Combine two flat arrays into a third one by the loop of a ufunc; False if it has none."},
    {"note_change", note_change, METH_NOARGS,
     "Invalidate the dispatch cache for calls without `group=`."},
    {"copy_once", copy_once, METH_VARARGS,
     "Copy bytes of an array into another one in one of three ways."},
    {"crc32", (PyCFunction)(void (*)(void))crc32_of, METH_FASTCALL,
     "Return the CRC-32 of a buffer, as zlib does."},
    {NULL},
};

#define DEFINED_TYPE(PREFIX) PyTypeObject *PREFIX##_type;
TYPES(DEFINED_TYPE)

/* Add a type to the module, and keep it for type checks. */
static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **kept) {
    *kept = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *kept == NULL ? -1 : PyModule_AddType(module, *kept);
}

static int prepare_module(PyObject *module) {
    choose_copy();
    prepare_checksum();
    if (find_numpy() < 0 || intern_names() < 0 || intern_kinds() < 0 ||
        PyModule_AddIntConstant(module, "FORM", FORM) < 0)
        return -1;
#define ADDED_TYPE(PREFIX)                                                                         \
    if (add_type(module, &PREFIX##_spec, &PREFIX##_type) < 0) return -1;
    TYPES(ADDED_TYPE)
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, prepare_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "syncvar._native.native",
    "Persistent calls, programs, variables and messages in shared memory, in C.",
    0,
    functions,
    module_slots,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit_native(void) { return PyModuleDef_Init(&definition); }
