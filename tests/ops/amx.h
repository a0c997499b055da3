/* The instructions of AMX by those of AVX-512, to be included before everything else: what they compute is that of the
 * Intel SDM, volume 2, "TDPBF16PS" and "TDPBSUD", to the bit. What a processor would fault at ends the process. */
#ifdef LMSTATE_AVX512
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h> /* before syscall is taken away */

typedef struct {
  struct { uint8_t palette, start_row, reserved[14]; uint16_t bytes_of_row[16]; uint8_t rows[16]; } shapes;
  _Alignas(64) uint8_t data[8][16][64];
} emulated_tiles;
__attribute__((weak)) _Thread_local emulated_tiles emulated; /* one of a thread, whichever file it is in */

#define EMULATED static inline __attribute__((unused))
#define FAULT(condition) do { if (condition) abort(); } while (0)

EMULATED void emulated_load(int t, const void *from, long stride) {
  FAULT(emulated.shapes.palette != 1);
  memset(emulated.data[t], 0, sizeof emulated.data[t]);
  for (int i = 0; i < emulated.shapes.rows[t]; i++)
    memcpy(emulated.data[t][i], (const char *)from + i * stride, emulated.shapes.bytes_of_row[t]);
}

EMULATED void emulated_store(int t, void *to, long stride) {
  FAULT(emulated.shapes.palette != 1);
  for (int i = 0; i < emulated.shapes.rows[t]; i++)
    memcpy((char *)to + i * stride, emulated.data[t][i], emulated.shapes.bytes_of_row[t]);
}

EMULATED void emulated_zero(int t) {
  FAULT(emulated.shapes.palette != 1);
  memset(emulated.data[t], 0, sizeof emulated.data[t]);
}

EMULATED void check_product(int to, int a, int b) {
  FAULT(emulated.shapes.palette != 1 || to == a || to == b || a == b);
  FAULT(emulated.shapes.rows[to] != emulated.shapes.rows[a]);
  FAULT(emulated.shapes.bytes_of_row[to] != emulated.shapes.bytes_of_row[b]);
  FAULT(emulated.shapes.bytes_of_row[a] != 4 * emulated.shapes.rows[b]);
}

/* Denormals are zeros, whatever a thread asks of other instructions. */
EMULATED void emulated_dpbf16ps(int to, int a, int b) {
  check_product(to, a, b);
  const unsigned before = _mm_getcsr();
  _mm_setcsr(_MM_MASK_MASK | _MM_FLUSH_ZERO_ON | 0x40);
  for (int m = 0; m < emulated.shapes.rows[to]; m++) {
    __m512 even = _mm512_setzero_ps(), odd = even;
    for (int k = 0; k < emulated.shapes.bytes_of_row[a] / 4; k++) {
      uint32_t pair;
      memcpy(&pair, emulated.data[a][m] + 4 * k, 4);
      const __m512i x = _mm512_set1_epi32((int)pair), w = _mm512_load_si512(emulated.data[b][k]);
      const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
      even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                             _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), even);
      odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, upper)),
                            _mm512_castsi512_ps(_mm512_and_si512(w, upper)), odd);
    }
    float *sums = (float *)emulated.data[to][m];
    _mm512_store_ps(sums, _mm512_add_ps(_mm512_load_ps(sums), _mm512_add_ps(even, odd)));
  }
  _mm_setcsr(before);
}

EMULATED void emulated_dpbsud(int to, int a, int b) {
  check_product(to, a, b);
  for (int m = 0; m < emulated.shapes.rows[to]; m++) {
    __m512i sums = _mm512_load_si512(emulated.data[to][m]);
    for (int k = 0; k < emulated.shapes.bytes_of_row[a] / 4; k++) {
      int32_t four;
      memcpy(&four, emulated.data[a][m] + 4 * k, 4);
      sums = _mm512_dpbusd_epi32(sums, _mm512_load_si512(emulated.data[b][k]), _mm512_set1_epi32(four));
    }
    _mm512_store_si512(emulated.data[to][m], sums);
  }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig(from) memcpy(&emulated.shapes, from, sizeof emulated.shapes)
#define _tile_release() memset(&emulated, 0, sizeof emulated)
#define _tile_loadd(t, from, stride) emulated_load(t, from, (long)(stride))
#define _tile_stored(t, to, stride) emulated_store(t, to, (long)(stride))
#define _tile_zero(t) emulated_zero(t)
#define _tile_dpbf16ps(to, a, b) emulated_dpbf16ps(to, a, b)
#define _tile_dpbsud(to, a, b) emulated_dpbsud(to, a, b)
#define __builtin_cpu_supports(name) 1
#define syscall(...) 0L
#endif
