/* The contract of the compiled library: build plans (`prefetch.core.copy_table`), images, pages, orders, queues and the
   records of formats. Plain C, no Python.

   A plan is a table. Each column says, for every row, where its value lies and where it goes; of all that a plan
   points to, nothing is owned or freed here. `core_run` makes the copies of one plan in the caller's thread; a
   queue has threads of its own, which cut plans into jobs. All calls are thread-safe for plans whose destinations
   do not overlap. */
#ifndef DATAFLOW_CORE_H
#define DATAFLOW_CORE_H
#include <stdint.h>

#define CORE_API __attribute__((visibility("default")))
#define CORE_VERSION 16 /* of this contract; `core_version` gives that of the library */

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
    uint8_t *out;           /* row r goes to out + offsets[r], or, where that is null, to out + out_step * r */
    int64_t out_step;
    const int64_t *offsets; /* [rows] bytes */
} core_column;

/* Does rows [first, last) of all columns. status[r] becomes 0, or 1 + the first column whose value could not be
   read; what its `out` holds of such a row, also in later columns, is arbitrary. Gives the number of such rows. */
CORE_API int64_t core_run(const core_column *columns, int64_t num_columns, int64_t first, int64_t last,
                          uint8_t *status);

/* Columns of equally wide numbers, aligned to their width, become rows:
   out[r * num_columns + c] = columns[c][r], r in [0, rows). */
CORE_API void core_interleave(const void *const *columns, int64_t num_columns, int64_t rows, int64_t width,
                              void *out);

/* What results of `core_resize` are like. */
enum core_filter {
    CORE_BILINEAR = 0,
    CORE_BICUBIC,
    CORE_AREA /* the mean of what a pixel of the result covers */
};

typedef struct {
    int64_t channels;      /* 1 to 4 */
    int64_t height, width; /* of results */
    int64_t filter;        /* `core_filter` */
    int64_t antialias;     /* whether the filter grows with the pixels of a result that is smaller */
    int64_t planar;        /* results are [channels][height][width], not [height][width][channels] */
    const float *numbers;  /* [channels][256] what becomes of each level. Null: results are the levels, uint8 */
} core_form;

/* Levels uint8 [..][stride], of which a part becomes a result. */
typedef struct {
    const uint8_t *pixels;
    int64_t stride;                   /* bytes from a row to the next */
    double top, left, height, width;  /* of the part, in pixels */
    int64_t least_row, past_row;      /* what a filter may look at beside the part, which lies within */
    int64_t least_column, past_column;
    int64_t flip;                     /* mirror left to right */
    void *out;
} core_image;

/* Resize an image. 0, or -1 where there is no memory for it. */
CORE_API int64_t core_resize(const core_image *image, const core_form *form);

/* A picture that becomes patches of another size. */
typedef struct {
    const uint8_t *pixels;         /* [height][stride], three channels a pixel */
    int64_t height, width, stride; /* `stride`: bytes from a row to the next */
    int64_t rows, columns;         /* of the result */
    int64_t reach;                 /* of the filter, in pixels: 1 bilinear, 2 bicubic; it grows with the pixels */
    int64_t down, across;          /* pixels of a patch; whole squares of patches divide the result */
    int64_t merge;                 /* patches along each side of a square; those of a square follow one another */
    uint8_t *out;                  /* [patches][3][down][across] */
} core_picture;

/* Resize a picture and cut it into patches, with the levels of torch's `interpolate` with antialias. 0, or -1 where
   there is no memory for it, or 1 where this processor has no AVX2: nothing is done then. */
CORE_API int64_t core_patches(const core_picture *picture);

/* ---- pages of mapped files ---------------------------------------------------------------------------------- */

enum core_range_flag {
    CORE_CHECK = 1, /* the file must still be what it was */
    CORE_KEPT = 2,  /* its pages may be there: they are looked for first */
    CORE_AHEAD = 4  /* the disk is asked for all pages before the first is waited for */
};

/* A range of a mapped file. */
typedef struct {
    const char *path;
    int64_t size, modified_ns; /* the file's, when it was indexed */
    uint8_t *address;          /* of its first page */
    int64_t nbytes;            /* 0: its pages are not wanted */
    int64_t flags;             /* `core_range_flag` */
} core_range;

/* Check files, and wait until the pages of all ranges are in this process. status[i] becomes 0, -1 where the file is
   not what it was or cannot be looked at, else the `errno` of what cannot be read. Gives how many are not 0. */
CORE_API int64_t core_bring(const core_range *ranges, int64_t n, int64_t *status);

/* A part of an open file. */
typedef struct {
    int64_t descriptor, offset, nbytes;
    uint8_t *out;
} core_part;

/* Read parts of files, one after the other. Gives how many came whole before the first that did not. */
CORE_API int64_t core_read(const core_part *parts, int64_t n);

/* ---- orders --------------------------------------------------------------------------------------------------- */

/* Permutations side by side: sizes[i] numbers from the sum of the sizes before on, in the order that keys[i] stands
   for (`seeded_permutation` of `sharding.order.permutations`). Takes 12 bytes for each of the largest. 0, or -1 where there is no
   memory for it. */
CORE_API int64_t core_seeded_permutations(const int64_t *sizes, const uint64_t *keys, int64_t count, int64_t *out);

/* Draws of sources by the lengths of their samples, as `DrawSources` of `sharding.mixture.token_schedule` says: at most
   `most`, fewer where the known lengths of a source end. Changes `owed` and `upcoming`; gives the number of draws. */
CORE_API int64_t core_token_draws(const int64_t *shares, int64_t *owed, const int64_t *lengths, int64_t *upcoming,
                                  const int64_t *end, int64_t sources, uint16_t *out, int64_t most);

/* The samples of batches, as sums that do not depend on their order. Row i of n is row `at[i]` of a chunk (ascending;
   null: first + i), in the batch b that ends[b] is the first row after, and stands for the number first_sample[k] +
   row_in_block[rows[i]] of the block k that holds rows[i]: the last one with first_row[k] <= rows[i]. `row_in_block`
   null: rows[i] - first_row[k]; `blocks` 0: the number is rows[i]. Its hash z is what `mix_more` of
   `sharding.order.permutations` makes of the key, the number, and begin and length of the row of the chunk, where these
   are not null. Added to sums[b][0] and sums[b][1], modulo 2^64, are z and z' * (z' >> 32 | 1) with z' = z rotated by
   32 bits. */
typedef struct {
    const int64_t *rows, *at;
    int64_t n, first;
    const int64_t *first_row, *first_sample; /* [blocks + 1], [blocks] */
    const int64_t *row_in_block;
    int64_t blocks;
    const int64_t *begin, *length, *ends;
    uint64_t key;
    uint64_t *sums;
} core_samples;

CORE_API void core_sum_samples(const core_samples *parts, int64_t count);

/* ---- protobuf messages ---------------------------------------------------------------------------------------- */

enum core_damage {
    CORE_CUT = -1,      /* it ends behind its message, or that behind the data */
    CORE_LONG = -2,     /* a number takes too many bytes */
    CORE_NUMBER_0 = -3, /* a field has number 0 */
    CORE_WIRE_TYPE = -4, /* a field has a wire type that there is not; groups are none */
    CORE_NO_EXAMPLE = -5,
    CORE_TOO_MANY_NAMES = -6
};

/* Rows of three numbers, of which `most` are written, column after column: out[3][most]. */
typedef struct {
    int64_t *out, most, found;
} core_rows;

typedef struct {
    const uint8_t *bytes;
    int64_t nbytes, wanted;
} core_name;

/* Records that are Examples or SequenceExamples, and what is found in them. */
typedef struct {
    const uint8_t *data;
    int64_t nbytes;
    const int64_t *starts, *ends; /* [num_records] */
    int64_t num_records;
    core_name *names; /* [most_names], of which num_names are known; others are added, whose bytes are those of `data` */
    int64_t num_names, most_names, wants_new;
    core_rows features; /* record, name, whether it is a feature list; only those of names that are wanted */
    core_rows steps;    /* the feature that each message of lists is of, 0, 0 */
    core_rows lists;    /* its step, kind (1 byte strings, 2 floats, 3 integers), 0 */
    core_rows values;   /* the list, where the value or values begin, and end */
} core_examples;

/* Find the features of records, in the order of these. 0, or a `core_damage`. */
CORE_API int64_t core_parse(core_examples *examples);

/* The varints of n spans that hold nothing else, one after the other: counts[i] of span i, and `most` in all at most.
   Gives how many, or a `core_damage`. Null `out`: spans are believed to be whole numbers, which are only counted. */
CORE_API int64_t core_numbers(const uint8_t *data, int64_t nbytes, const int64_t *starts, const int64_t *ends,
                              int64_t n, int64_t *counts, int64_t *out, int64_t most);

/* The records of n simple chunks of riegeli that are not compressed: where each begins, and its bytes. counts[i]: how
   many the chunk at data[at[i]] has. 0, or -1, where a chunk is another one or damaged: nothing is told then. */
CORE_API int64_t core_records(const uint8_t *data, int64_t nbytes, const int64_t *at, const int64_t *counts, int64_t n,
                              int64_t *starts, int64_t *sizes);

/* ---- checksums ------------------------------------------------------------------------------------------------ */

/* CRC-32C of n spans, sizes[i] bytes from data[starts[i]] on. `by_tables`: also where the processor has an instruction.
   0, or `CORE_CUT`, where a span leaves the data: nothing is told then. */
CORE_API int64_t core_crc32c(const uint8_t *data, int64_t nbytes, const int64_t *starts, const int64_t *sizes, int64_t n,
                             uint32_t *out, int64_t by_tables);

/* The records of a TFRecord file, one behind the other from its first byte on, up to one that is not whole, or whose
   length has another checksum: where each begins, and its bytes. Gives how many, `most` at most. */
CORE_API int64_t core_tfrecords(const uint8_t *data, int64_t nbytes, int64_t *starts, int64_t *sizes, int64_t most);

/* ---- JSON Lines ----------------------------------------------------------------------------------------------- */

enum core_lines {
    CORE_LINES_READ = 0, /* each line is blank or holds one object, none of which has a key twice */
    CORE_LINE_KEYS,      /* an object of this line has a key twice; or it has more keys or levels than are looked at */
    CORE_LINES_ODD       /* a line, this one or a later one, does not hold one whole object */
};

/* Look at lines up to one that differs. Text that is not JSON gives an answer, too, and only that. Keys are compared
   as they are spelled. `keys`: `slots` words (2, 4, 8, ...), 0 before and after, and half as many of any kind.
   0 slots: keys are not looked at. found[0]: lines before that, blank ones aside; found[1]: where it begins. */
CORE_API int64_t core_json_lines(const uint8_t *text, int64_t nbytes, uint64_t *keys, int64_t slots, int64_t found[2]);

CORE_API int64_t core_version(void);

/* ---- queues: plans that threads run, job by job ------------------------------------------------------------- */

/* A plan whose copies are made in jobs: consecutive rows that fill one slot. It begins CORE_PLAN_WORDS +
   CORE_JOB_WORDS * num_jobs words of 8 bytes, all others 0 at first, which are the queue's until the plan is over:
   all of its jobs were taken, or the queue is closed. So long everything that it points to must live, too. */
typedef struct {
    const core_column *columns; /* their `out` is not used */
    int64_t num_columns, num_jobs;
    int64_t number;         /* plans are run in this order, smallest first, whatever order they come in */
    const int64_t *ends;    /* [num_jobs] job j does the rows from the end of the one before to ends[j] */
    const int64_t *offsets; /* [num_jobs][num_columns + 1] where in the job's slot its first row goes, of every
                               column; the last one is not read */
    int64_t slot_bytes;     /* what a slot must hold */
    const int64_t *generation; /* of what keeps files at their length: in a later one than that which the plan was */
    int64_t planned_in;        /* made in, only the kernel reads, whatever columns say. Null: as columns say */
    uint8_t *status;        /* [rows] as `core_run` gives it */
} core_plan;

#define CORE_PLAN_WORDS 16
#define CORE_JOB_WORDS 3

enum core_answer {
    CORE_READY = 0,
    CORE_NOT_READY, /* somebody else is at work on the job, or nobody yet */
    CORE_NEED_SLOT, /* nobody is at work on the job, for want of a slot: give one, and ask again */
    CORE_STOPPED
};

typedef struct core_queue core_queue;

/* A queue in `core_queue_bytes` of memory, with `num_threads` threads, which no signal interrupts. Threads that ran
   out of slots are woken when there are `wake_at` of them, or one for every job that waits, and not for each slot.
   Gives the number of threads that the system granted; without any the queue works, too. The memory must live
   until the queue is closed and nobody is in a call. */
CORE_API int64_t core_queue_bytes(void);
CORE_API int64_t core_open(core_queue *queue, int64_t num_threads, int64_t wake_at);

/* Have a plan run. */
CORE_API void core_submit(core_queue *queue, core_plan *plan);

/* Lend a slot: writable memory aligned to 8 bytes. `under`: to be used only when there is no other. Jobs use what
   was given last first. 0: there are too many. */
CORE_API int64_t core_give(core_queue *queue, uint8_t *slot, int64_t nbytes, int64_t under);

/* A slot that no job has used, back from the queue: one that is too small for a job that waits, or any when none
   does. Null: there is none. */
CORE_API uint8_t *core_take_back(core_queue *queue);

/* The next job of a plan. Only one thread at a time takes.
   CORE_READY: answer[0] is its slot, which is the caller's again, answer[1] the number of rows with a status.
   answer[2], of any answer but CORE_NOT_READY, is how many jobs wait, of all plans. Does not wait. */
CORE_API int64_t core_take(core_queue *queue, core_plan *plan, int64_t answer[3]);

/* Work until `core_take` has something to tell, at most `timeout_ns`; waits where there is nothing to do. */
CORE_API int64_t core_work(core_queue *queue, core_plan *plan, int64_t timeout_ns, int64_t answer[3]);

/* Wait until all jobs are over that were begun before the call. */
CORE_API void core_drain(core_queue *queue);

/* Nanoseconds that the queue's threads have worked, and the jobs that are over. */
CORE_API void core_count(core_queue *queue, int64_t counts[2]);

/* Begin no more jobs; does not wait. Whoever waits hears of it. */
CORE_API void core_stop(core_queue *queue);

/* Stop, and wait until nothing runs. What plans point to is free to go then, and so are slots. Called once;
   whoever asks for a job gets CORE_STOPPED. */
CORE_API void core_close(core_queue *queue);

/* Handle signals in a worker process: those `numbers` do nothing, but SIGTERM from the process `from` ends this one
   with code 0. Programs that it starts have the system's handling again. Gives 0, or `errno`. */
CORE_API int64_t core_shield(const int64_t *numbers, int64_t count, int64_t from);

/* The system's handling again, of those signals that are still handled as above or below. */
CORE_API void core_unshield(const int64_t *numbers, int64_t count);

/* End this process when its parent `from` ends, whichever of its threads forked it; by signal `number`, which is
   sent at the end of that thread. Gives 0, or `errno`. */
CORE_API int64_t core_end_with_parent(int64_t number, int64_t from);

/* Write the native frames of the thread that gets signal `number` to a descriptor, under a line "native:", and then
   do what was done before. A negative descriptor prepares for that, before a fork. Gives 0, or `errno`. */
CORE_API int64_t core_tell_frames(int64_t number, int64_t descriptor);
#endif
