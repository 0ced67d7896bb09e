/* bullet_graph._smctrl: the SM mask that the CUDA driver keeps in its stream object.
 *
 * A CUstream handle points to a pointer to that object: base = *(char **)stream. At base + offset lies one of
 * the two structs below; the kernel launches that follow on the stream obey it. The offset differs from
 * driver to driver. Which offset is right, and when it may be written to, is decided in Python
 * (bullet_graph/partition): here are only reads, writes, and the argument checks that keep them inside the
 * object.
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

/* A set bit disables a TPC. No bit set: no mask. Drivers up to CUDA 11.8. */
struct mask_64 {
    uint32_t upper;
    uint32_t lower;
};

/* A set bit disables a TPC; bit i is in mask[i / 32]. Drivers from CUDA 12.0 on. */
struct mask_128 {
    uint32_t enabled;
    uint32_t mask[4];
};

/* Where a stream's mask is, and which struct lies there. */
struct field {
    unsigned long long stream;
    unsigned long long offset;
    unsigned long long layout;
    void *address;
};

/* "O&" converter. PyArg's own unsigned formats wrap around without an error. */
static int as_u64(PyObject *object, void *out) {
    unsigned long long value = PyLong_AsUnsignedLongLong(object);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        return 0;
    }
    *(unsigned long long *)out = value;
    return 1;
}

/* Checks the arguments and sets field->address; 0 with an exception where they cannot be right. */
static int locate(struct field *field) {
    if (field->layout != 64 && field->layout != 128) {
        PyErr_Format(PyExc_ValueError, "layout must be 64 or 128 (mask bits), got %llu", field->layout);
        return 0;
    }
    size_t field_bytes = field->layout == 64 ? sizeof(struct mask_64) : sizeof(struct mask_128);
    if (field->offset % sizeof(uint32_t) != 0 || field->offset > MAX_OBJECT_BYTES - field_bytes) {
        PyErr_Format(PyExc_ValueError, "offset must be a multiple of 4 and at most %u, got %llu",
                     (unsigned)(MAX_OBJECT_BYTES - field_bytes), field->offset);
        return 0;
    }
    /* Also refuses the driver's special handles 1 (legacy) and 2 (per-thread), which are no addresses. */
    if (field->stream == 0 || field->stream % sizeof(void *) != 0) {
        PyErr_Format(PyExc_ValueError, "stream must be the handle of a created CUstream, got %llu",
                     field->stream);
        return 0;
    }
    char *base = *(char **)(uintptr_t)field->stream;
    if (base == NULL || (uintptr_t)base % sizeof(uint32_t) != 0) {
        PyErr_Format(PyExc_ValueError, "stream %llu does not point to a driver object", field->stream);
        return 0;
    }
    field->address = base + field->offset;
    return 1;
}

static void write_mask(const struct field *field, uint32_t enabled, uint64_t low, uint64_t high) {
    if (field->layout == 64) {
        struct mask_64 *mask = field->address;
        mask->upper = (uint32_t)(low >> 32);
        mask->lower = (uint32_t)low;
        return;
    }
    struct mask_128 *mask = field->address;
    mask->mask[0] = (uint32_t)low;
    mask->mask[1] = (uint32_t)(low >> 32);
    mask->mask[2] = (uint32_t)high;
    mask->mask[3] = (uint32_t)(high >> 32);
    mask->enabled = enabled;
}

static PyObject *set_mask(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static char *names[] = {"stream", "offset", "layout", "disable_low", "disable_high", "enabled", NULL};
    struct field field;
    unsigned long long low, high, enabled = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&O&O&|O&:set_mask", names, as_u64, &field.stream,
                                     as_u64, &field.offset, as_u64, &field.layout, as_u64, &low, as_u64,
                                     &high, as_u64, &enabled)) {
        return NULL;
    }
    if (enabled > UINT32_MAX) {
        return PyErr_Format(PyExc_ValueError, "enabled must fit 32 bits, got %llu", enabled);
    }
    if (!locate(&field)) {
        return NULL;
    }
    if (field.layout == 64 && high != 0) {
        return PyErr_Format(PyExc_ValueError, "the 64-bit layout has no TPC above 63, got disable_high %llu",
                            high);
    }
    write_mask(&field, (uint32_t)enabled, low, high);
    Py_RETURN_NONE;
}

/* Parses (stream, offset, layout); `format` ends in the function's name. */
static int parse_field(PyObject *args, PyObject *kwargs, const char *format, struct field *field) {
    static char *names[] = {"stream", "offset", "layout", NULL};
    return PyArg_ParseTupleAndKeywords(args, kwargs, format, names, as_u64, &field->stream, as_u64,
                                       &field->offset, as_u64, &field->layout) &&
           locate(field);
}

static PyObject *clear_mask(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    struct field field;
    if (!parse_field(args, kwargs, "O&O&O&:clear_mask", &field)) {
        return NULL;
    }
    write_mask(&field, 0, 0, 0);
    Py_RETURN_NONE;
}

static PyObject *get_mask(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    struct field field;
    if (!parse_field(args, kwargs, "O&O&O&:get_mask", &field)) {
        return NULL;
    }
    if (field.layout == 64) {
        const struct mask_64 *mask = field.address;
        unsigned long long low = (unsigned long long)mask->upper << 32 | mask->lower;
        return Py_BuildValue("IKK", (unsigned)(low != 0), low, 0ull);
    }
    const struct mask_128 *mask = field.address;
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
    METHOD(set_mask, "Write a stream's mask of disabled TPCs."),
    METHOD(clear_mask, "Take a stream's mask away."),
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
