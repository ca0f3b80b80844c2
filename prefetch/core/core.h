/* The contract of the compiled executor of build plans (`prefetch.core.plan`): plain C, no Python.

   A plan is a table. Each column says, for every row, where its value lies and where it goes; nothing is owned,
   kept or freed here. All calls are thread-safe for plans whose destinations do not overlap. */
#ifndef DATAFLOW_CORE_H
#define DATAFLOW_CORE_H
#include <stdint.h>

#define CORE_API __attribute__((visibility("default")))
#define CORE_VERSION 1 /* of this contract; `core_version` gives that of the library */

enum core_op {
    CORE_COPY = 0, /* the value as it is stored */
    CORE_WIDEN = 1 /* stored integers, which may lie anywhere, become int64, aligned to 8 bytes */
};

enum core_type { CORE_U8 = 0, CORE_I8, CORE_U16, CORE_I16, CORE_U32, CORE_I32 };

typedef struct {
    int64_t op;
    int64_t stored;         /* CORE_WIDEN: `core_type` of a stored number */
    int64_t may_load;       /* 0: a page of the source may be gone, and only the kernel may read it */
    int64_t base, step;     /* the value of row r lies at base + step * index[r] */
    const int64_t *index;   /* [rows] */
    int64_t each;           /* bytes of every stored value, where `lengths` is null */
    const int64_t *lengths; /* [rows] bytes of the stored values, >= 0; null: all are as long as `each` */
    uint8_t *out;           /* row r goes to out + places[r], or, where that is null, to out + out_step * r */
    int64_t out_step;
    const int64_t *places; /* [rows] bytes */
} core_column;

/* Does rows [first, last) of all columns. status[r] becomes 0, or 1 + the first column whose value could not be
   read; what its `out` holds of such a row, also in later columns, is arbitrary. Gives the number of such rows. */
CORE_API int64_t core_run(const core_column *columns, int64_t num_columns, int64_t first, int64_t last,
                          uint8_t *status);

/* Columns of equally wide numbers, aligned to their width, become rows:
   out[r * num_columns + c] = columns[c][r], r in [0, rows). */
CORE_API void core_interleave(const void *const *columns, int64_t num_columns, int64_t rows, int64_t width,
                              void *out);

CORE_API int64_t core_version(void);
#endif
