/* What all C of this package begins with. Only the limited API of CPython is used: one build serves every version from 3.11 on. */
#ifndef SYNCVAR_COMMON_H
#define SYNCVAR_COMMON_H
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() ((void)0)
#endif

/* The beginning of NumPy's PyArrayObject, which its C interface has kept since version 1. */
typedef struct {
    PyObject_HEAD char *data;
    int ndim;
    intptr_t *shape;
    intptr_t *strides;
    PyObject *base;
    PyObject *dtype;
    int flags;
} Array;

#define IN_ONE_PIECE 0x0001
#define ALIGNED 0x0100
#define WRITEABLE 0x0400

#endif
