"""The integers of MPI. Their values are syncvar's own; programs use the names."""

from __future__ import annotations

import math

UNDEFINED = -32766
ANY_SOURCE = -1
ANY_TAG = -1
PROC_NULL = -2
ROOT = -3
KEYVAL_INVALID = -1
TAG_MAX = (1 << 31) - 1  # the value of the attribute TAG_UB

TAG_UB, IO, WTIME_IS_GLOBAL, UNIVERSE_SIZE, APPNUM, LASTUSEDCODE = range(1001, 1007)
WIN_BASE, WIN_SIZE, WIN_DISP_UNIT, WIN_CREATE_FLAVOR, WIN_MODEL = range(1011, 1016)
WIN_FLAVOR = WIN_CREATE_FLAVOR

ORDER_C, ORDER_FORTRAN = 56, 57
ORDER_F = ORDER_FORTRAN
TYPECLASS_REAL, TYPECLASS_INTEGER, TYPECLASS_COMPLEX, TYPECLASS_LOGICAL = range(1, 5)
DISTRIBUTE_BLOCK, DISTRIBUTE_CYCLIC, DISTRIBUTE_NONE = 121, 122, 123
DISTRIBUTE_DFLT_DARG = -49767

COMBINER_NAMED, COMBINER_DUP, COMBINER_CONTIGUOUS, COMBINER_VECTOR = range(1, 5)
COMBINER_HVECTOR, COMBINER_INDEXED, COMBINER_HINDEXED, COMBINER_INDEXED_BLOCK = range(5, 9)
COMBINER_HINDEXED_BLOCK, COMBINER_STRUCT, COMBINER_SUBARRAY, COMBINER_DARRAY = range(9, 13)
COMBINER_RESIZED, COMBINER_VALUE_INDEX = 13, 14
COMBINER_F90_INTEGER, COMBINER_F90_REAL, COMBINER_F90_COMPLEX = 15, 16, 17

IDENT, CONGRUENT, SIMILAR, UNEQUAL = range(4)
GRAPH, CART, DIST_GRAPH = 1, 2, 3
UNWEIGHTED, WEIGHTS_EMPTY = 10, 11

COMM_TYPE_SHARED, COMM_TYPE_HW_GUIDED, COMM_TYPE_HW_UNGUIDED = 1, 2, 3
COMM_TYPE_RESOURCE_GUIDED = 4
BSEND_OVERHEAD = 96

WIN_FLAVOR_CREATE, WIN_FLAVOR_ALLOCATE, WIN_FLAVOR_DYNAMIC, WIN_FLAVOR_SHARED = range(1, 5)
WIN_SEPARATE, WIN_UNIFIED = 1, 2
MODE_NOCHECK, MODE_NOSTORE, MODE_NOPUT, MODE_NOPRECEDE, MODE_NOSUCCEED = (
    1 << bit for bit in range(10, 15)
)
LOCK_EXCLUSIVE, LOCK_SHARED = 234, 235

MODE_CREATE, MODE_RDONLY, MODE_WRONLY, MODE_RDWR = 1, 2, 4, 8
MODE_DELETE_ON_CLOSE, MODE_UNIQUE_OPEN, MODE_EXCL, MODE_APPEND = 16, 32, 64, 128
MODE_SEQUENTIAL = 256
SEEK_SET, SEEK_CUR, SEEK_END = 600, 602, 604
DISPLACEMENT_CURRENT = -54278278
DISP_CUR = DISPLACEMENT_CURRENT

THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
VERSION, SUBVERSION = 4, 1

MAX_PROCESSOR_NAME = 256
MAX_ERROR_STRING = 512
MAX_PORT_NAME = 256
MAX_INFO_KEY = 255
MAX_INFO_VAL = 1024
MAX_OBJECT_NAME = 128
MAX_DATAREP_STRING = 128
MAX_LIBRARY_VERSION_STRING = 256
MAX_PSET_NAME_LEN = 256
MAX_STRINGTAG_LEN = 256
F_SOURCE, F_TAG, F_ERROR, F_STATUS_SIZE = 0, 1, 2, 6

SUCCESS = 0
ERROR_TEXTS = {
    "ERR_BUFFER": "invalid buffer",
    "ERR_COUNT": "invalid count",
    "ERR_TYPE": "invalid datatype",
    "ERR_TAG": "invalid tag",
    "ERR_COMM": "invalid communicator",
    "ERR_RANK": "invalid rank",
    "ERR_REQUEST": "invalid request",
    "ERR_ROOT": "invalid root",
    "ERR_GROUP": "invalid group",
    "ERR_OP": "invalid operation",
    "ERR_TOPOLOGY": "invalid topology",
    "ERR_DIMS": "invalid dimensions",
    "ERR_ARG": "invalid argument",
    "ERR_UNKNOWN": "unknown error",
    "ERR_TRUNCATE": "the message is longer than the receive buffer",
    "ERR_OTHER": "other error",
    "ERR_INTERN": "internal error",
    "ERR_IN_STATUS": "the error is in the status",
    "ERR_PENDING": "the request is pending",
    "ERR_INFO": "invalid info",
    "ERR_ERRHANDLER": "invalid error handler",
    "ERR_SESSION": "invalid session",
    "ERR_WIN": "invalid window",
    "ERR_FILE": "invalid file",
    "ERR_KEYVAL": "invalid key of an attribute",
    "ERR_NO_MEM": "out of memory",
    "ERR_INFO_KEY": "the key of an info is too long",
    "ERR_INFO_VALUE": "the value of an info is too long",
    "ERR_INFO_NOKEY": "the info has no such key",
    "ERR_SPAWN": "cannot start processes",
    "ERR_PORT": "invalid port",
    "ERR_SERVICE": "invalid service",
    "ERR_NAME": "invalid name",
    "ERR_PROC_ABORTED": "a process has aborted",
    "ERR_BASE": "invalid base",
    "ERR_SIZE": "invalid size",
    "ERR_DISP": "invalid displacement",
    "ERR_ASSERT": "invalid assertion",
    "ERR_LOCKTYPE": "invalid kind of lock",
    "ERR_RMA_CONFLICT": "conflicting accesses to a window",
    "ERR_RMA_SYNC": "wrong synchronization of a window",
    "ERR_RMA_RANGE": "the access is outside the window",
    "ERR_RMA_ATTACH": "memory cannot be attached",
    "ERR_RMA_SHARED": "memory cannot be shared",
    "ERR_RMA_FLAVOR": "wrong kind of window",
    "ERR_BAD_FILE": "invalid file name",
    "ERR_NO_SUCH_FILE": "there is no such file",
    "ERR_FILE_EXISTS": "the file exists",
    "ERR_FILE_IN_USE": "the file is in use",
    "ERR_AMODE": "invalid access mode",
    "ERR_ACCESS": "access denied",
    "ERR_READ_ONLY": "the file is read-only",
    "ERR_NO_SPACE": "no space is left",
    "ERR_QUOTA": "the quota is exceeded",
    "ERR_NOT_SAME": "arguments differ between ranks",
    "ERR_IO": "input or output error",
    "ERR_UNSUPPORTED_OPERATION": "the operation is not supported",
    "ERR_UNSUPPORTED_DATAREP": "the data representation is not supported",
    "ERR_CONVERSION": "cannot convert the data",
    "ERR_DUP_DATAREP": "the data representation exists",
    "ERR_VALUE_TOO_LARGE": "the value is too large",
    "ERR_REVOKED": "the communicator is revoked",
    "ERR_PROC_FAILED": "a process has failed",
    "ERR_PROC_FAILED_PENDING": "a process has failed, and the request is pending",
    "ERR_ABI": "wrong binary interface",
}
ERROR_CLASSES = {name: number for number, name in enumerate(ERROR_TEXTS, start=1)}
ERR_LASTCODE = 1 << 14  # first number of user-defined classes and codes

ERR_ARG = ERROR_CLASSES["ERR_ARG"]
ERR_BUFFER = ERROR_CLASSES["ERR_BUFFER"]
ERR_COMM = ERROR_CLASSES["ERR_COMM"]
ERR_COUNT = ERROR_CLASSES["ERR_COUNT"]
ERR_DIMS = ERROR_CLASSES["ERR_DIMS"]
ERR_ERRHANDLER = ERROR_CLASSES["ERR_ERRHANDLER"]
ERR_GROUP = ERROR_CLASSES["ERR_GROUP"]
ERR_INFO = ERROR_CLASSES["ERR_INFO"]
ERR_KEYVAL = ERROR_CLASSES["ERR_KEYVAL"]
ERR_LOCKTYPE = ERROR_CLASSES["ERR_LOCKTYPE"]
ERR_OP = ERROR_CLASSES["ERR_OP"]
ERR_OTHER = ERROR_CLASSES["ERR_OTHER"]
ERR_PENDING = ERROR_CLASSES["ERR_PENDING"]
ERR_RANK = ERROR_CLASSES["ERR_RANK"]
ERR_REQUEST = ERROR_CLASSES["ERR_REQUEST"]
ERR_ROOT = ERROR_CLASSES["ERR_ROOT"]
ERR_TAG = ERROR_CLASSES["ERR_TAG"]
ERR_TOPOLOGY = ERROR_CLASSES["ERR_TOPOLOGY"]
ERR_TRUNCATE = ERROR_CLASSES["ERR_TRUNCATE"]
ERR_TYPE = ERROR_CLASSES["ERR_TYPE"]
ERR_UNSUPPORTED_OPERATION = ERROR_CLASSES["ERR_UNSUPPORTED_OPERATION"]
ERR_WIN = ERROR_CLASSES["ERR_WIN"]
ERR_RMA_RANGE = ERROR_CLASSES["ERR_RMA_RANGE"]
ERR_RMA_SYNC = ERROR_CLASSES["ERR_RMA_SYNC"]

FOREVER = math.inf
