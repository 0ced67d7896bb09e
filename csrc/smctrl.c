/* bullet_graph._smctrl: the SM mask that the CUDA driver keeps in its stream object.
 *
 * A CUstream handle points to a pointer to that object: base = *(char **)stream. At base + offset lies the
 * struct below (drivers from CUDA 12.0 on); the kernel launches that follow on the stream obey it. The offset
 * differs from driver to driver. Python (bullet_graph/partition) decides which offset is right and when it
 * may be written to: here are only reads, writes, and the argument checks that keep them inside the object.
 *
 * libcuda is opened at run time and only asked for its version, so this builds and imports without CUDA.
 */
#define _GNU_SOURCE /* dladdr */
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

/* In every known driver the field lies well below this; an offset above it is a mistake. */
#define MAX_OBJECT_BYTES 0x1000u

#define DEFAULT_LIBCUDA "libcuda.so.1"

/* A set bit disables a TPC; bit i is in mask[i / 32]. */
struct tpc_mask {
    uint32_t enabled;
    uint32_t mask[4];
};

/* The streams whose objects may be reached: a handle that was not registered is never followed.
 * The GIL guards the list. */
#define MAX_STREAMS 64
static unsigned long long streams[MAX_STREAMS];

/* Where the handle stands among the registered ones; 0 finds a free place, NULL says that there is none. */
static unsigned long long *find_stream(unsigned long long stream) {
    for (size_t i = 0; i < MAX_STREAMS; i++) {
        if (streams[i] == stream) {
            return &streams[i];
        }
    }
    return NULL;
}

/* "O&" converter. PyArg's own unsigned formats wrap around without an error. */
static int as_u64(PyObject *object, void *out) {
    unsigned long long value = PyLong_AsUnsignedLongLong(object);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        return 0;
    }
    *(unsigned long long *)out = value;
    return 1;
}

/* The address of a stream's mask, or NULL with an exception where the arguments cannot be right. */
static struct tpc_mask *locate(unsigned long long stream, unsigned long long offset) {
    const unsigned last = MAX_OBJECT_BYTES - sizeof(struct tpc_mask);
    if (offset % sizeof(uint32_t) != 0 || offset > last) {
        PyErr_Format(PyExc_ValueError, "offset must be a multiple of 4 and at most %u, got %llu", last,
                     offset);
        return NULL;
    }
    if (stream == 0 || find_stream(stream) == NULL) {
        PyErr_Format(PyExc_ValueError, "stream must be a registered CUstream, got %llu", stream);
        return NULL;
    }
    char *base = *(char **)(uintptr_t)stream;
    if (base == NULL || (uintptr_t)base % sizeof(uint32_t) != 0) {
        PyErr_Format(PyExc_ValueError, "stream %llu does not point to a driver object", stream);
        return NULL;
    }
    return (struct tpc_mask *)(base + offset);
}

static PyObject *register_stream(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static char *names[] = {"stream", NULL};
    unsigned long long stream;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:register_stream", names, as_u64, &stream)) {
        return NULL;
    }
    /* Also refuses the driver's special handles 1 (legacy) and 2 (per-thread), which are no addresses. */
    if (stream == 0 || stream % sizeof(void *) != 0) {
        return PyErr_Format(PyExc_ValueError, "stream must be the handle of a created CUstream, got %llu",
                            stream);
    }
    unsigned long long *place = find_stream(stream);
    if (place == NULL && (place = find_stream(0)) == NULL) {
        return PyErr_Format(PyExc_RuntimeError, "at most %d streams can be registered: forget one first",
                            MAX_STREAMS);
    }
    *place = stream;
    Py_RETURN_NONE;
}

static PyObject *forget_stream(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static char *names[] = {"stream", NULL};
    unsigned long long stream;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:forget_stream", names, as_u64, &stream)) {
        return NULL;
    }
    unsigned long long *place = find_stream(stream);
    if (place != NULL) {
        *place = 0;
    }
    Py_RETURN_NONE;
}

static PyObject *set_mask(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static char *names[] = {"stream", "offset", "disable_low", "disable_high", "enabled", NULL};
    unsigned long long stream, offset, low, high, enabled = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&O&|O&:set_mask", names, as_u64, &stream, as_u64,
                                     &offset, as_u64, &low, as_u64, &high, as_u64, &enabled)) {
        return NULL;
    }
    if (enabled > UINT32_MAX) {
        return PyErr_Format(PyExc_ValueError, "enabled must fit 32 bits, got %llu", enabled);
    }
    struct tpc_mask *mask = locate(stream, offset);
    if (mask == NULL) {
        return NULL;
    }
    mask->mask[0] = (uint32_t)low;
    mask->mask[1] = (uint32_t)(low >> 32);
    mask->mask[2] = (uint32_t)high;
    mask->mask[3] = (uint32_t)(high >> 32);
    mask->enabled = (uint32_t)enabled;
    Py_RETURN_NONE;
}

static PyObject *get_mask(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static char *names[] = {"stream", "offset", NULL};
    unsigned long long stream, offset;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&:get_mask", names, as_u64, &stream, as_u64,
                                     &offset)) {
        return NULL;
    }
    const struct tpc_mask *mask = locate(stream, offset);
    if (mask == NULL) {
        return NULL;
    }
    unsigned long long low = (unsigned long long)mask->mask[1] << 32 | mask->mask[0];
    unsigned long long high = (unsigned long long)mask->mask[3] << 32 | mask->mask[2];
    return Py_BuildValue("IKK", (unsigned)mask->enabled, low, high);
}

typedef int (*driver_get_version)(int *version);

/* cuDriverGetVersion of the library that `args` names, or NULL with an OSError. */
static driver_get_version open_driver(PyObject *args, PyObject *kwargs, const char *format) {
    static char *names[] = {"libcuda", NULL};
    PyObject *path = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, names, PyUnicode_FSConverter, &path)) {
        return NULL;
    }
    /* NODELETE: libcuda starts threads and is not made to be unloaded. */
    void *library = dlopen(path == NULL ? DEFAULT_LIBCUDA : PyBytes_AsString(path),
                           RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    Py_XDECREF(path);
    if (library == NULL) {
        PyErr_Format(PyExc_OSError, "no driver: %s", dlerror());
        return NULL;
    }
    driver_get_version get_version;
    *(void **)&get_version = dlsym(library, "cuDriverGetVersion");
    if (get_version == NULL) {
        PyErr_Format(PyExc_OSError, "no driver: %s", dlerror());
    }
    dlclose(library);
    return get_version;
}

static PyObject *driver_version(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    driver_get_version get_version = open_driver(args, kwargs, "|O&:driver_version");
    if (get_version == NULL) {
        return NULL;
    }
    int version = 0;
    int result = get_version(&version);
    if (result != 0) {
        return PyErr_Format(PyExc_RuntimeError, "no driver: cuDriverGetVersion returned CUDA error %d",
                            result);
    }
    return PyLong_FromLong(version);
}

static PyObject *driver_path(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    driver_get_version get_version = open_driver(args, kwargs, "|O&:driver_path");
    if (get_version == NULL) {
        return NULL;
    }
    Dl_info info;
    dladdr(*(void **)&get_version, &info); /* cannot fail: the address is from dlsym */
    return PyUnicode_DecodeFSDefault(info.dli_fname);
}

#define METHOD(name, doc) {#name, (PyCFunction)(void (*)(void))name, METH_VARARGS | METH_KEYWORDS, doc}

static PyMethodDef methods[] = {
    METHOD(register_stream, "Allow the masks of a created CUstream to be read and written."),
    METHOD(forget_stream, "Refuse a stream again; before it is destroyed."),
    METHOD(set_mask, "Write a stream's mask of disabled TPCs."),
    METHOD(get_mask, "Read a stream's mask: (enabled, low, high)."),
    METHOD(driver_version, "The CUDA version that libcuda supports, such as 13000."),
    METHOD(driver_path, "The file that libcuda was loaded from."),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "bullet_graph._smctrl",
    .m_doc = "The SM mask in the CUDA driver's stream object.",
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__smctrl(void) { return PyModuleDef_Init(&module); }
