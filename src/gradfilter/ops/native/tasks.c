/* The library's door: it says which tasks it takes and where their fields are, and runs packed ones. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "tasks.h"

typedef struct {
    char *to;
    int64_t room, used;
} text;

__attribute__((format(printf, 2, 3))) static void add(text *t, const char *format, ...) {
    const int64_t left = t->used < t->room ? t->room - t->used : 0;
    va_list values;
    va_start(values, format);
    const int count = vsnprintf(left ? t->to + t->used : NULL, (size_t)left, format, values);
    va_end(values);
    if (count > 0) t->used += count;
}

/* The name of a field's type, which the compiler knows. A struct or an array that is not listed here would be told as a
 * pointer of another size than pointers have, which Python refuses. */
#define TYPE(field)                                                                                                   \
    _Generic(&(field), int32_t *: "int32", int64_t *: "int64", float *: "float", double *: "double",                  \
             gf_axes *: "int64[8]", gf_mix *: "float[4][4]", gf_taps *: "float[4][3]", gf_map *: "map",               \
             gf_norm_act *: "norm_act", gf_dense *: "dense", gf_depthwise *: "depthwise",                             \
             gf_pair_axis *: "pair_axis", gf_tile_axis *: "tile_axis", default: "pointer")

/* A function for each struct, so that `owner` is that struct in each. */
#define ADD_FIELD(type, name)                                                                                         \
    add(t, "%s." #name ": %s at byte %zu, %zu bytes\n", record, TYPE(((owner *)0)->name), offsetof(owner, name),      \
        sizeof(((owner *)0)->name));
#define DESCRIBE(name, fields)                                                                                        \
    static void describe_##name(text *t, const char *record) {                                                        \
        typedef gf_##name owner;                                                                                      \
        fields(ADD_FIELD)                                                                                             \
        add(t, "%s: %zu bytes\n", record, sizeof(owner));                                                             \
    }
GF_STRUCTS(DESCRIBE)

#define NUMBER(name, record) NUMBER_##name,
enum { GF_TASKS(NUMBER) COUNT };

/* Write a line for each field, struct, task and constant, up to `room` bytes; return how many bytes all of it has. */
GF_EXPORT int64_t gf_describe(char *to, int64_t room) {
    text t = {to, room, 0};
#define ADD_STRUCT(name, fields) describe_##name(&t, #name);
#define ADD_TASK(name, record) add(&t, "task " #name ": number %d, a " #record "\n", NUMBER_##name);
#define ADD_CONSTANT(name) add(&t, #name ": %d\n", name);
    GF_STRUCTS(ADD_STRUCT)
    GF_TASKS(ADD_TASK)
    GF_CONSTANTS(ADD_CONSTANT)
    return t.used;
}

/* Room for any task: the caller's bytes have no alignment. */
#define UNION_MEMBER(name, record) gf_##record name;
typedef union {
    GF_TASKS(UNION_MEMBER)
} any_task;

#define RUN(name, record)                                                                                             \
    static int run_##name(const any_task *task, int threads) { return gf_##name##_map(&task->name, threads); }
GF_TASKS(RUN)

#define ENTRY(name, record) {run_##name, sizeof(gf_##record)},
static const struct {
    int (*run)(const any_task *task, int threads);
    int64_t bytes;
} ENTRIES[] = {GF_TASKS(ENTRY)};

/* Returned where the bytes are not those of tasks of this library: then nothing was run. */
enum { REFUSED = -2 };

/* Read the header of the task at `at`; return the bytes of both, or REFUSED. */
static int64_t read_header(const char *at, const char *end, gf_header *header) {
    const int64_t left = end - at, size = sizeof *header;
    if (left < size) return REFUSED;
    memcpy(header, at, sizeof *header);
    if (header->task < 0 || header->task >= COUNT || header->bytes != ENTRIES[header->task].bytes) return REFUSED;
    return left < size + header->bytes ? REFUSED : size + header->bytes;
}

/* Run packed tasks that follow each other, each behind its header, up to one that returns another code than 0: that is
 * returned. */
GF_EXPORT int gf_run_tasks(const void *packed, int64_t bytes, int threads) {
    const char *const start = packed, *const end = start + bytes;
    gf_header header;
    for (const char *at = start; at < end;) {
        const int64_t size = read_header(at, end, &header);
        if (size < 0) return REFUSED;
        at += size;
    }
    int code = 0;
    for (const char *at = start; at < end && !code; at += sizeof header + (size_t)header.bytes) {
        read_header(at, end, &header);
        any_task task;
        memcpy(&task, at + sizeof header, (size_t)header.bytes);
        code = ENTRIES[header.task].run(&task, threads);
    }
    return code;
}
