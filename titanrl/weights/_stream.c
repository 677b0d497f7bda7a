/* Batches of copies that bypass the CPU caches and run without the GIL.

   A normal store first reads the cache line that it overwrites, so a copy moves three bytes per byte copied. A non-temporal
   store skips that read and evicts no other data. glibc's memcpy also uses such stores, but only above a machine-dependent size
   that single tensors do not reach, and it cannot cast. Full lines are streamed; the ends of a row are stored normally.

   Sources are prefetched one page ahead. The processor's own prefetcher stops at the end of each page, and then waits for memory. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define LINE 64
#define AHEAD 4096 /* bytes; 3 to 32 KiB gain the same, 1 KiB gains less */

/* Compiled twice; the loader picks one. Wider vectors than AVX2's do not help, because memory bandwidth is the limit. */
#if defined(__x86_64__) && defined(__gnu_linux__)
#define AVX2_IF_AVAILABLE __attribute__((target_clones("avx2", "default")))
#else
#define AVX2_IF_AVAILABLE
#endif

typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint16_t Bf16x8 __attribute__((vector_size(16)));
typedef uint32_t Bits8 __attribute__((vector_size(32)));
typedef int32_t Ints8 __attribute__((vector_size(32)));

/* A block of rows; the fields match `Rows` in `titanrl.weights.transport`. */
typedef struct {
    char *target;
    const char *source;
    int64_t rows;
    int64_t length;        /* elements per row */
    int64_t target_stride; /* bytes between the starts of target rows */
    int64_t source_stride; /* bytes between the starts of source rows */
    int64_t item;          /* bytes per element; 0 casts float32 to bfloat16 */
} Copy;

static inline void stream(char *target, Bytes16 value) {
#ifdef __SSE2__
    _mm_stream_si128((__m128i *)target, (__m128i)value);
#else
    memcpy(target, &value, sizeof value);
#endif
}

/* Make earlier stores visible to other processes before later stores. Streamed stores need a fence before and after, because
   they can be reordered with normal stores, such as those of an arena's sequence number. */
static inline void fence(void) {
#ifdef __SSE2__
    _mm_sfence();
#else
    __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

static void copy_row(char *target, const char *source, size_t size) {
    size_t head = -(uintptr_t)target % LINE;
    head = head < size ? head : size;
    memcpy(target, source, head);
    for (target += head, source += head, size -= head; size >= LINE; target += LINE, source += LINE, size -= LINE) {
        __builtin_prefetch(source + AHEAD); /* never faults, even past the end */
        Bytes16 line[LINE / 16];
        memcpy(line, source, LINE);
        for (int i = 0; i < LINE / 16; i++) stream(target + 16 * i, line[i]);
    }
    memcpy(target, source, size);
}

/* Round to nearest, ties to even; NaN stays NaN. */
static inline uint16_t bf16(uint32_t bits) {
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline Bf16x8 bf16x8(const uint32_t *source) {
    Bits8 bits;
    memcpy(&bits, source, sizeof bits);
    Bits8 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    Bits8 is_nan = (Bits8)((Ints8)(bits & 0x7fffffff) > 0x7f800000);
    return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), Bf16x8);
}

AVX2_IF_AVAILABLE static void cast_row(uint16_t *target, const uint32_t *source, size_t length) {
    for (; length && (uintptr_t)target % LINE; length--) *target++ = bf16(*source++);
    for (; length >= LINE / 2; length -= LINE / 2, target += LINE / 2, source += LINE / 2) {
        __builtin_prefetch((const char *)source + AHEAD);
        __builtin_prefetch((const char *)source + AHEAD + LINE);
        for (int i = 0; i < LINE / 2; i += 8) stream((char *)(target + i), (Bytes16)bf16x8(source + i));
    }
    while (length--) *target++ = bf16(*source++);
}

static void run_copy(const Copy *copy) {
    char *target = copy->target;
    const char *source = copy->source;
    for (int64_t row = 0; row < copy->rows; row++, target += copy->target_stride, source += copy->source_stride) {
        if (copy->item)
            copy_row(target, source, copy->length * copy->item);
        else
            cast_row((uint16_t *)target, (const uint32_t *)source, copy->length);
    }
}

static PyObject *run(PyObject *Py_UNUSED(module), PyObject *table) {
    Py_buffer view;
    if (PyObject_GetBuffer(table, &view, PyBUF_SIMPLE)) return NULL;
    if (view.len % sizeof(Copy)) {
        PyBuffer_Release(&view);
        return PyErr_Format(PyExc_ValueError, "table: size must be a multiple of %zu bytes (got %zd)", sizeof(Copy), view.len);
    }
    const Copy *copies = view.buf;
    Py_BEGIN_ALLOW_THREADS;
    fence();
    for (size_t i = 0; i < view.len / sizeof(Copy); i++) run_copy(copies + i);
    fence();
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"run", run, METH_O, "Run all copies of a table."}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_stream", .m_doc = "Cache-bypassing copies.", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__stream(void) { return PyModule_Create(&definition); }
