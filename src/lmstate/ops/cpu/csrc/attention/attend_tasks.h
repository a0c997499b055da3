/* How attention is cut: chunks of positions, tasks of one kv head over a chunk, and where their parts are. */
#ifndef LMSTATE_ATTEND_TASKS_H
#define LMSTATE_ATTEND_TASKS_H

#include "attention/kv_layout.h"

/* Chunks grow with the position, so that their number, and the memory for their parts, stays small. */
static int64_t chunk_begin(int64_t c) {
  if (c <= 32) return 256 * c;
  if (c <= 88) return 8192 + 1024 * (c - 32);
  return 65536 + 4096 * (c - 88);
}
static int64_t chunk_of(int64_t position) {
  if (position < 8192) return position / 256;
  if (position < 65536) return 32 + (position - 8192) / 1024;
  return 88 + (position - 65536) / 4096;
}

/* What a task is of, and the positions that it reads. */
typedef struct { int64_t r, kv, place, first_token, last_token, from, until; } task_of;

/* Tasks of a row are numbered [kv head][chunk, or none][run of new tokens]; `place` is the number without the run. */
static task_of numbered_task(const attend_args *a, const attend_plan *all, int64_t number) {
  int64_t low = 0, high = a->rows - 1; /* the last row whose first task is not beyond this one */
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (all->rows[middle].first_task <= number) low = middle;
    else high = middle - 1;
  }
  const row_plan *plan = &all->rows[low];
  const int64_t task = number - plan->first_task, start = a->starts[low];
  task_of t = {.r = low, .place = task / plan->runs, .first_token = task % plan->runs * all->run};
  t.last_token = t.first_token + all->run < a->counts[low] ? t.first_token + all->run : a->counts[low];
  t.from = low_of(a, start + t.first_token), t.until = start + t.last_token;
  t.kv = all->whole ? t.place : t.place / plan->chunks;
  if (all->whole) return t;
  const int64_t c = plan->chunk + t.place % plan->chunks;
  if (t.from < chunk_begin(c)) t.from = chunk_begin(c);
  if (t.until > chunk_begin(c + 1)) t.until = chunk_begin(c + 1);
  return t;
}

/* What a task takes of a thread, as a number of positions: those that it reads, and half a microsecond (on Zen 5)
 * before them. */
static int64_t work_of(int64_t positions) { return positions + 32; }

/* The task that begins nearest to `work` behind the first one, where a thread's tasks begin: a row's last chunk may be
 * of few positions. Of one run of new tokens a row. */
static int64_t task_after(const attend_args *a, const attend_plan *all, int64_t work) {
  int64_t r = 0;
  for (; r < a->rows && a->kv_heads * all->rows[r].work <= work; r++) work -= a->kv_heads * all->rows[r].work;
  if (r == a->rows) return all->tasks;
  const row_plan *row = &all->rows[r];
  int64_t task = row->first_task + work / row->work * row->chunks;
  for (work %= row->work; work > 0; task++) {
    const task_of t = numbered_task(a, all, task);
    const int64_t own = work_of(t.until - t.from);
    if (2 * work < own) break;
    work -= own;
  }
  return task;
}

/* Among the queries of all rows. */
static int64_t query_number(const attend_args *a, const attend_plan *all, int64_t r, int64_t token, int64_t head) {
  return (all->rows[r].first_token + token) * a->heads + head;
}

/* Where the part of the row's first query is. */
static int64_t first_part_of(const attend_args *a, const attend_plan *all, const task_of *task) {
  const row_plan *row = &all->rows[task->r];
  return row->first_part + task->place * a->counts[task->r] * (a->heads / a->kv_heads);
}

#endif
