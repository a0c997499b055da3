/* Attention of new tokens over the stored ones, for up to some hundreds of new tokens a row.
 *
 * The positions are cut at fixed places (`chunk_begin`). A task is one kv head of one row over one chunk, for a run of
 * the row's new tokens and all query heads of that kv head, so that keys and values are read once for them; each task
 * leaves its part of the softmax, and the parts are put together in the order of the chunks. Where there are tasks
 * enough without it, one has all chunks, and puts each part to those before it while the caches hold it. Where a
 * query's sum is cut depends on its own position alone: its result has the same bits beside other queries, rows and
 * numbers of threads. */
#include <omp.h>
#include <stdlib.h>

#include "attention/attend_softmax.h"
#include "attention/attend_tasks.h"
#include "attention/attend_widen.h"
#include "attention/kv_read.h"
#include "layout.h"
#include "team.h"

/* New tokens per task, more where there are enough tasks: their queries read keys and values together. */
enum { RUN = 32, QUERIES = 384 };

/* Up to TILE queries over positions b..b + SUB of one kv head. */
static void tile(const attend_args *a, const source *s, const float *const *q, const int64_t *low, const int64_t *end,
                 const float *slope, const float *const *bias, const partial_softmax *to, int queries, int64_t b) {
  int64_t first = b + SUB, last = b;
  for (int j = 0; j < queries; j++) {
    if (low[j] < first) first = low[j];
    if (end[j] > last) last = end[j];
  }
  if (first < b) first = b;
  if (last > b + SUB) last = b + SUB;
  if (first >= last) return;
  const source here = source_at_tile(s, b);
  const ring_ranges keys = ring_ranges_of(&here.k, first, last, b), values = ring_ranges_of(&here.v, first, last, b);
  float scores[TILE][SUB];
  memset(scores, 0, (size_t)queries * sizeof *scores);
  here.score(a, &here, q, queries, &keys, b % here.k.slots, scores);
  for (int j = 0; j < queries; j++) {
    const int64_t seen = low[j] > b ? (low[j] < b + SUB ? low[j] - b : SUB) : 0;
    const int64_t until = end[j] < b + SUB ? (end[j] > b ? end[j] - b : 0) : SUB;
    softmax_update(a, scores[j], &to[j], seen, until, slope[j], bias[j], end[j] - 1 - b);
    if (to[j].weights) {
      memcpy(to[j].weights + b, scores[j], SUB * sizeof(float));
      to[j].peaks[b / SUB] = *to[j].largest;
    }
  }
  here.add(a, &here, to, queries, &values, scores);
}

/* What a kv head has stored: as floats, and in `coded` as codes if it has any. */
static source stored_of(const attend_args *a, const attend_plan *all, int64_t r, int64_t kv, source *coded) {
  source floats = {0};
  if (!all->codes || all->codes->tail) floats = floats_of(a, all, r, kv);
  if (all->codes) {
    *coded = codes_of(a, all->codes, r, kv);
    floats.v = coded->v, floats.add = coded->add;
  }
  return floats;
}

/* From the tile at b on, ask for the first ones of a task instead of those that come after it. */
static void look_ahead(const attend_args *a, const attend_plan *all, int64_t number, int64_t b, source *floats,
                       source *coded) {
  const task_of next = numbered_task(a, all, number);
  const int64_t at = next.from / SUB * SUB;
  source next_coded = {0}, next_floats = stored_of(a, all, next.r, next.kv, &next_coded);
  source *const of[] = {floats, coded}, *const then[] = {&next_floats, &next_coded};
  for (int i = 0; i < 2; i++) {
    if (!of[i]->k.slots) continue; /* there is none of these */
    of[i]->k.ahead = slot_of(&then[i]->k, at) - slot_of(&of[i]->k, b);
    of[i]->v.ahead = slot_of(&then[i]->v, at) - slot_of(&of[i]->v, b);
  }
}

/* Queries first..n of a task over the positions from..until, which are in one chunk. */
static __attribute__((noinline)) void run_queries(const attend_args *a, const attend_plan *all, int64_t number,
                                                  const task_of *task, int64_t from, int64_t until, int64_t first,
                                                  int64_t n) {
  const int64_t group = a->heads / a->kv_heads, r = task->r, kv = task->kv, start = a->starts[r];
  const int64_t first_part = first_part_of(a, all, task);
  const float *queries_of_row = a->q + all->rows[r].q;
  source coded = {0}, floats = stored_of(a, all, r, kv, &coded);
  const int rounds = attends_bf16(a, all, r); /* then values are written before they are read */
  for (int64_t j = first; j < n; j++) {
    partial_softmax p = part_at(a, all->parts, first_part + j);
    *p.largest = -INFINITY, *p.sum = 0;
    if (!rounds) memset(p.values, 0, (size_t)a->dim_v * sizeof(float));
  }
  if (rounds) {
    bf16_task of = {.args = a, .codes = all->codes, .floats = &floats, .coded = &coded, .q = queries_of_row,
                    .parts = part_at(a, all->parts, first_part).largest, .row = r, .kv = kv,
                    .first = first, .n = n, .from = from, .until = until};
    source next_task = floats, unused = {0};
    if (!all->whole && !all->codes && number + 1 < all->tasks) {
      look_ahead(a, all, number + 1, (until - 1) / SUB * SUB, &next_task, &unused);
      of.next_task = &next_task;
    }
    attend_bf16(&of);
    return;
  }
  const int wide = widens(a, all, n - first);
  widened_tile tile_floats;
  int leaves = !all->whole && (task->place + 1) % all->rows[r].chunks == 0 && number + 1 < all->tasks;
  for (int64_t b = from / SUB * SUB; b < until; b += SUB) {
    /* The next task is elsewhere, and no more than half a tile of this head is left behind this one. */
    if (leaves && until - b <= SUB + SUB / 2) {
      look_ahead(a, all, number + 1, b, &floats, &coded);
      leaves = 0;
    }
    /* The queries before this one are in this block or before it: they see keys of it as floats. */
    const int64_t far = !all->codes ? n : all->codes->tail ? (b + SUB - start) * group : 0;
    const source read = wide ? widened(a, &floats, b, from, until, &tile_floats) : floats;
    int queries;
    for (int64_t j = first; j < n; j += queries) {
      const float *q[TILE], *bias[TILE];
      int64_t low[TILE], end[TILE];
      float slope[TILE];
      partial_softmax to[TILE];
      const int64_t stop = j < far && far < n ? far : n;
      queries = stop - j < TILE ? (int)(stop - j) : TILE;
      for (int i = 0; i < queries; i++) {
        const int64_t token = (j + i) / group, head = kv * group + (j + i) % group;
        q[i] = queries_of_row + token * a->q_token + head * a->q_head;
        low[i] = low_of(a, start + token), end[i] = start + token + 1;
        slope[i] = a->slopes ? a->slopes[head] : 0;
        bias[i] = a->biases ? a->biases + (all->rows[r].first_token + token) * a->bias_token + head * a->distances : NULL;
        to[i] = part_at(a, all->parts, first_part + j + i);
        if (a->columns) {
          const int64_t query = query_number(a, all, r, token, head);
          to[i].weights = all->weights + query * all->padded, to[i].peaks = all->peaks + query * (all->padded / SUB);
        }
      }
      tile(a, j < far ? &read : &coded, q, low, end, slope, bias, to, queries, b);
    }
  }
}

/* Queries that are computed together multiply a value that only some of them see by 0, and 0 times an infinite value is
 * NaN. Compute this one alone, over what it sees. */
static void attend_alone(const attend_args *a, const attend_plan *all, int64_t r, int64_t token, int64_t head) {
  const row_plan *row = &all->rows[r];
  const int64_t group = a->heads / a->kv_heads, kv = head / group, j = token * group + head % group;
  const int64_t end = a->starts[r] + token + 1, low = low_of(a, end - 1);
  const whole_softmax to = whole_of(a, all, r, token, head);
  begin_whole(a, head, &to);
  for (int64_t c = chunk_of(low); c <= chunk_of(end - 1); c++) {
    const task_of task = {.r = r, .kv = kv, .place = all->whole ? kv : kv * row->chunks + c - row->chunk};
    const int64_t from = chunk_begin(c), until = chunk_begin(c + 1);
    run_queries(a, all, all->tasks, &task, low > from ? low : from, end < until ? end : until, j, j + 1);
    const partial_softmax p = part_at(a, all->parts, first_part_of(a, all, &task) + j);
    add_part_to_whole(a, &p, &to);
  }
  end_whole(a, &to);
}

static void run_task(const attend_args *a, const attend_plan *all, int64_t number) {
  const task_of task = numbered_task(a, all, number);
  const int64_t group = a->heads / a->kv_heads, first_part = first_part_of(a, all, &task);
  const int64_t first = task.first_token * group, last = task.last_token * group, head = task.kv * group;
  if (!all->whole) {
    run_queries(a, all, number, &task, task.from, task.until, first, last);
    return;
  }
  for (int64_t j = first; j < last; j++) {
    const whole_softmax to = whole_of(a, all, task.r, j / group, head + j % group);
    begin_whole(a, head + j % group, &to);
  }
  for (int64_t from = task.from, until; from < task.until; from = until) {
    until = chunk_begin(chunk_of(from) + 1) < task.until ? chunk_begin(chunk_of(from) + 1) : task.until;
    run_queries(a, all, number, &task, from, until, first, last);
    for (int64_t j = first; j < last; j++) {
      const partial_softmax p = part_at(a, all->parts, first_part + j);
      const whole_softmax to = whole_of(a, all, task.r, j / group, head + j % group);
      add_part_to_whole(a, &p, &to);
    }
  }
  for (int64_t j = first; j < last; j++) {
    const whole_softmax to = whole_of(a, all, task.r, j / group, head + j % group);
    if (!end_whole(a, &to)) attend_alone(a, all, task.r, j / group, head + j % group);
  }
}

/* The parts of one query. */
static void combine(const attend_args *a, const attend_plan *all, int64_t r, int64_t token, int64_t head) {
  const row_plan *plan = &all->rows[r];
  const int64_t group = a->heads / a->kv_heads, n = a->counts[r] * group;
  const int64_t first = plan->first_part + head / group * plan->chunks * n + token * group + head % group;
  const whole_softmax to = whole_of(a, all, r, token, head);
  begin_whole(a, head, &to);
  for (int64_t c = 0; c < plan->chunks; c++) {
    const partial_softmax p = part_at(a, all->parts, first + c * n);
    add_part_to_whole(a, &p, &to);
  }
  if (!end_whole(a, &to) && a->counts[r] > 1) attend_alone(a, all, r, token, head);
}

/* Add to the columns of one kv head what its slots received, averaged over the group: in the order of the queries. No
 * ring wraps here, so that position p is in slot p. Columns that are of this call alone begin as zeros where anything
 * of them is read: behind its filled slots nothing is, nor before the planes of its tokens. */
static void add_columns(const attend_args *a, const attend_plan *all, int64_t r, int64_t kv) {
  const int64_t group = a->heads / a->kv_heads;
  const int64_t end = a->ends ? a->ends[r] : a->starts[r] + a->counts[r];
  for (int64_t plane = a->planes > a->counts[r] ? a->planes - a->counts[r] : 0; !a->ends && plane < a->planes; plane++)
    memset(a->columns + ((r * a->kv_heads + kv) * a->planes + plane) * a->slots, 0, (size_t)end * sizeof(float));
  for (int64_t token = 0; token < a->counts[r]; token++) {
    const int64_t own = a->starts[r] + token, plane = own + a->planes - end;
    float *column = a->columns + ((r * a->kv_heads + kv) * a->planes + (plane < 0 ? 0 : plane)) * a->slots;
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
      const int64_t query = query_number(a, all, r, token, h);
      const float *weights = all->weights + query * all->padded, *total = all->totals + 2 * query;
      for (int64_t b = low_of(a, own) / SUB * SUB; b <= own; b += SUB) {
        const float peak = all->peaks[query * (all->padded / SUB) + b / SUB];
        const float keep = expf(peak - total[0]) / (total[1] * (float)group);
        const int64_t n = a->slots - b < SUB ? a->slots - b : SUB;
        int64_t t = 0;
        for (; t + VL <= n; t += VL)
          vf_store(column + b + t, vf_fma(vf_set1(keep), vf_load(weights + b + t), vf_load(column + b + t)));
        for (; t < n; t++) column[b + t] += keep * weights[b + t];
      }
    }
  }
}

static int64_t all_tokens(const attend_args *a, const packed_tokens *packed) {
  return packed ? packed->begins[a->rows] : a->rows * a->tokens;
}

/* Whether every thread has enough tasks if a task has this many new tokens and all chunks. */
static int enough_runs(const attend_args *a, int64_t run) {
  int64_t runs = 0;
  for (int64_t r = 0; r < a->rows; r++) runs += (a->counts[r] + run - 1) / run;
  return runs * a->kv_heads >= 4 * a->threads;
}

int64_t attend_check(const attend_args *a, const codes_args *codes) {
  for (int64_t r = 0; r < a->rows; r++) {
    const int64_t start = a->starts[r], count = a->counts[r];
    /* The ring must hold everything that the row's queries see; a row without tokens sees nothing. */
    const int64_t first = a->columns ? 0 : low_of(a, start); /* a ring that wraps has no columns */
    const int beyond = (a->ends && a->ends[r] < start + count) /* there is no plane for their sums */
                       /* or they, behind the table */
                       || ((codes ? codes->k_table : a->k_table) && start + count > a->slots);
    if (start < 0 || count < 0 || count > a->tokens || (count && (beyond || start + count - first > a->slots)))
      return 1 + r;
  }
  return 0;
}

int64_t attend_begin(const attend_args *a, const codes_args *codes, const packed_tokens *packed, attend_plan *plan) {
  const int64_t refused = attend_check(a, codes);
  if (refused) return refused;
  plan->tasks = 0;
  plan->parts = plan->weights = NULL;
  plan->packed = packed, plan->codes = codes, plan->extra_key = NULL;
  plan->rows = malloc((size_t)(a->rows + 1) * sizeof(row_plan));
  if (!plan->rows) return -1;
  int64_t parts = 0;
  plan->run = RUN;
  plan->whole = a->tokens > RUN && enough_runs(a, RUN);
  while (2 * plan->run * (a->heads / a->kv_heads) <= QUERIES && enough_runs(a, 2 * plan->run)) plan->run *= 2;
  for (int64_t r = 0; r < a->rows; r++) {
    const int64_t start = a->starts[r], count = a->counts[r];
    row_plan *row = &plan->rows[r];
    row->first_task = plan->tasks, row->first_part = parts;
    row->first_token = packed ? packed->begins[r] : r * a->tokens;
    row->q = packed ? packed->begins[r] * a->q_token : r * a->q_row;
    row->chunk = chunk_of(low_of(a, start));
    row->chunks = count ? chunk_of(start + count - 1) + 1 - row->chunk : 0;
    row->runs = (count + plan->run - 1) / plan->run;
    row->work = 0;
    const int64_t low = low_of(a, start);
    for (int64_t c = row->chunk, from = low; c < row->chunk + row->chunks; c++, from = chunk_begin(c))
      row->work += work_of((chunk_begin(c + 1) < start + count ? chunk_begin(c + 1) : start + count) - from);
    const int64_t places = a->kv_heads * (plan->whole ? row->chunks > 0 : row->chunks);
    plan->tasks += places * row->runs;
    parts += places * (a->heads / a->kv_heads) * count;
  }
  const size_t of_parts = (size_t)parts * (size_t)(a->dim_v + 2);
  const size_t queries = (size_t)(all_tokens(a, packed) * a->heads), totals = 2 * queries;
  plan->parts = malloc((of_parts + totals + 1) * sizeof(float));
  if (a->columns) {
    plan->padded = (a->slots + SUB - 1) / SUB * SUB;
    plan->weights = malloc((queries * (size_t)(plan->padded + plan->padded / SUB) + 1) * sizeof(float));
    plan->peaks = plan->weights + queries * (size_t)plan->padded;
  }
  if (plan->parts && (plan->weights || !a->columns)) {
    plan->totals = plan->parts + of_parts;
    return 0;
  }
  attend_end(plan);
  return -1;
}

void attend_end(attend_plan *plan) {
  free(plan->weights);
  free(plan->parts);
  free(plan->rows);
}

void attend_run(const attend_args *a, const attend_plan *plan) {
  begin_attend_bf16(a, plan);
  if (a->tokens > RUN) { /* later runs see more */
#pragma omp for schedule(dynamic) nowait
    for (int64_t task = 0; task < plan->tasks; task++) run_task(a, plan, task);
  } else { /* a thread's tasks follow each other in memory: what one asks for ahead is what the next one reads */
    const int64_t id = omp_get_thread_num(), threads = omp_get_num_threads();
    int64_t work = 0;
    for (int64_t r = 0; r < a->rows; r++) work += a->kv_heads * plan->rows[r].work;
    const int64_t last = task_after(a, plan, work * (id + 1) / threads);
    for (int64_t task = task_after(a, plan, work * id / threads); task < last; task++) run_task(a, plan, task);
  }
  team_barrier();
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < all_tokens(a, plan->packed) * a->heads; i++) {
    const int64_t number = i / a->heads, r = plan->packed ? plan->packed->rows[number] : number / a->tokens;
    const int64_t token = number - plan->rows[r].first_token;
    if (token >= a->counts[r]) memset(a->out + i * a->dim_v, 0, (size_t)a->dim_v * sizeof(float));
    else if (!plan->whole) combine(a, plan, r, token, i % a->heads);
  }
  end_attend_bf16(a, plan);
  team_barrier();
  if (!a->columns) return;
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < a->rows * a->kv_heads; i++) add_columns(a, plan, i / a->kv_heads, i % a->kv_heads);
  team_barrier();
}

int64_t lmstate_attend(const attend_args *a) {
  if (a->rows == 0 || a->tokens == 0) return 0;
  attend_plan plan;
  const int64_t status = attend_begin(a, NULL, NULL, &plan);
  if (status) return status;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  attend_run(a, &plan);
  attend_end(&plan);
  return 0;
}

/* Rotate the new queries and keys, store keys and values, attend: what a layer does between its products. */
int64_t lmstate_rotate_attend(const rotate_attend_args *a) {
  lmstate_rope(&a->q);
  lmstate_rope(&a->k);
  const int64_t status = lmstate_append(&a->store);
  if (status) return status;
  return lmstate_attend(&a->attend);
}

EXPORT_SIZE(attend_args);
EXPORT_SIZE(rotate_attend_args);
