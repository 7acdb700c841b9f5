// The few operations of a decoder, on a CPU, over one flat axis of tokens.
//
// The one idea: a decode step reads every weight once for a handful of tokens, so time goes where memory is read. Here
// weights lie in the order in which they are read (`packing.py`), a panel is used for all tokens while the next one is
// on its way, and attention reads keys and values through the block table, without a gathered copy of the cache.
//
// A number of the result depends on its own row alone: sums run in the same order however many rows there are. So a
// request gets the same bits alone, in a batch, and in chunks of any size.
//
// Vectors are the compiler's own (GCC and Clang), as wide as the processor's: one source for AVX-512, AVX2, and others.
// T is float, or bf16 for weights, cache and the inputs of products; sums are always in float.
// Left out: checks of sizes and pointers (`decoder.py` makes buffers that fit), other number formats.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__AVX512BF16__) || defined(__AMX_BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define INLINE static inline __attribute__((always_inline))  // vectors stay in registers

#if defined(__AVX512F__)
constexpr int LANES = 16, MOST_ROWS = 12;  // 12 rows x 2 vectors of sums, 2 of weights: 26 of 32 registers
#elif defined(__AVX__)
constexpr int LANES = 8, MOST_ROWS = 6;  // 14 of 16 registers
#else
constexpr int LANES = 4, MOST_ROWS = 6;
#endif
constexpr int PANEL = 2 * LANES;  // columns of a product that are computed together

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));  // at any address
typedef int32_t LooseInts __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

INLINE Vec load(const float* p) { return *(const Loose*)p; }
INLINE void store(float* p, Vec v) { *(Loose*)p = v; }
INLINE Vec all(float x) { return x - Vec{}; }

INLINE Ints lane() {
    Ints result{};
    for (int i = 0; i < LANES; i++) result[i] = i;
    return result;
}

#if defined(__clang__)
template <int HALF, bool OTHER, int... N>
INLINE Vec mix_clang(Vec a, Vec b, std::integer_sequence<int, N...>) {
    return __builtin_shufflevector(a, b, ((OTHER ? N ^ HALF : N) + (N & HALF ? LANES : 0))...);
}
#endif

// Lanes whose number has the bit HALF come from b, the others from a; OTHER: each from its neighbour across that bit.
template <int HALF, bool OTHER>
INLINE Vec mix(Vec a, Vec b) {
#if defined(__clang__)
    return mix_clang<HALF, OTHER>(a, b, std::make_integer_sequence<int, LANES>{});
#else
    Ints n = lane();
    return __builtin_shuffle(a, b, (OTHER ? n ^ HALF : n) + ((n & HALF) != 0 ? LANES - Ints{} : Ints{}));
#endif
}

// [LANES] vectors -> one vector with the sum of each.
template <int HALF = LANES / 2>
INLINE Vec sums(Vec* v) {
#pragma GCC unroll 8
    for (int j = 0; j < HALF; j++) v[j] = mix<HALF, false>(v[j], v[j + HALF]) + mix<HALF, true>(v[j], v[j + HALF]);
    if constexpr (HALF > 1) return sums<HALF / 2>(v);
    return v[0];
}

template <int HALF = LANES / 2>
INLINE float sum(Vec v) {
    v += mix<HALF, true>(v, v);
    if constexpr (HALF > 1) return sum<HALF / 2>(v);
    return v[0];
}

template <int HALF = LANES / 2>
INLINE float largest(Vec v) {
    Vec other = mix<HALF, true>(v, v);
    v = v > other ? v : other;
    if constexpr (HALF > 1) return largest<HALF / 2>(v);
    return v[0];
}

// e^x, relative error below 2e-7: 2^n times a polynomial of the rest, which is at most ln(2) / 2. NaN stays NaN.
INLINE Vec exponential(Vec x) {
    x = x < -87.0f ? all(-87.0f) : x;
    x = x > 88.0f ? all(88.0f) : x;
    const Vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    Vec n = x * 1.44269504f + magic;
    Ints power = ((Ints)n - (Ints)magic + 127) << 23;
    n -= magic;
    Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vec p = all(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = p * r + c;
    return (p * r * r + r + 1.0f) * (Vec)power;
}

// bf16: the upper half of a float. Rounded to the nearest, ties to even; NaN stays NaN.
struct bf16 {
    uint16_t bits;
    operator float() const {
        uint32_t wide = (uint32_t)bits << 16;
        float x;
        std::memcpy(&x, &wide, 4);
        return x;
    }
};

typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

INLINE Vec load(const bf16* p) { return (Vec)(__builtin_convertvector(*(const Halves*)p, Ints) << 16); }

INLINE float narrow(float x, float) { return x; }
INLINE bf16 narrow(float x, bf16) {
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    if (x != x) return {(uint16_t)(wide >> 16 | 64)};
    return {(uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
}

// ---- Products ----

// Sums of ROWS rows times one panel. Weights: for each k (float) or pair of k (bf16) the PANEL columns.
template <int ROWS>
static void multiply(Vec (&acc)[ROWS][2], const float* x, long stride, const float* w, long inner, const char* next,
                     long pace) {
    for (long k = 0; k < inner; k++, w += PANEL, next += pace) {
        __builtin_prefetch(next);
        __builtin_prefetch(next + 64);
        Vec w0 = load(w), w1 = load(w + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            float value = x[r * stride + k];
            acc[r][0] += value * w0;
            acc[r][1] += value * w1;
        }
    }
}

INLINE Ints pair_at(const bf16* x, long count) {
    uint32_t bits = 0;
    std::memcpy(&bits, x, 2 * count);
    return (int32_t)bits - Ints{};
}

INLINE void add_pair(Vec& acc, Ints x, Ints w) {
#if defined(__AVX512BF16__)
    acc = (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)w);
#else
    acc += (Vec)(x << 16) * (Vec)(w << 16);
    acc += (Vec)(x & -65536) * (Vec)(w & -65536);
#endif
}

template <int ROWS>
INLINE void multiply_pair(Vec (&acc)[ROWS][2], const bf16* x, long stride, const bf16* w, long count) {
    Ints w0 = *(const LooseInts*)w, w1 = *(const LooseInts*)(w + 2 * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        Ints value = pair_at(x + r * stride, count);
        add_pair(acc[r][0], value, w0);
        add_pair(acc[r][1], value, w1);
    }
}

template <int ROWS>
static void multiply(Vec (&acc)[ROWS][2], const bf16* x, long stride, const bf16* w, long inner, const char* next,
                     long pace) {
    for (long k = 0; k + 1 < inner; k += 2, w += 2 * PANEL, next += pace) {
        __builtin_prefetch(next);
        __builtin_prefetch(next + 64);
        multiply_pair<ROWS>(acc, x + k, stride, w, 2);
    }
    if (inner % 2) multiply_pair<ROWS>(acc, x + inner - 1, stride, w, 1);
}

// ---- Products of bf16 on tiles (AMX), where the processor has them ----

// A tile is up to 16 rows of 64 bytes. The sums of 32 rows and 32 columns take tiles 0-3, rows 4 and 5, weights 6 and 7;
// a step of the loop takes 32 inputs. Built with -DEMULATE_AMX tiles are arrays, so that any processor can test this.
constexpr int TILE = 16;

#if defined(EMULATE_AMX)
#define TILES 1
static thread_local struct { int rows; char bytes[TILE][64]; } tiles[8];
static bool have_tiles() { return true; }
static void load_tile(int n, const void* from, long stride) {
    for (int r = 0; r < tiles[n].rows; r++) std::memcpy(tiles[n].bytes[r], (const char*)from + r * stride, 64);
}
static void store_tile(int n, void* to, long stride) {
    for (int r = 0; r < tiles[n].rows; r++) std::memcpy((char*)to + r * stride, tiles[n].bytes[r], 64);
}
static void multiply_tiles(int sums, int x, int w) {
    for (int r = 0; r < tiles[x].rows; r++)
        for (int k = 0; k < TILE; k++)
            for (int c = 0; c < 2 * TILE; c++)
                ((float*)tiles[sums].bytes[r])[c / 2] +=
                    ((bf16*)tiles[x].bytes[r])[2 * k + c % 2] * ((bf16*)tiles[w].bytes[k])[c];
}
#elif defined(__AMX_BF16__) && defined(__linux__)
#define TILES 1
#define load_tile(n, from, stride) _tile_loadd(n, from, stride)
#define store_tile(n, to, stride) _tile_stored(n, to, stride)
#define multiply_tiles(sums, x, w) _tile_dpbf16ps(sums, x, w)
static bool have_tiles() {  // Linux gives them to a process that asks
    static const bool given = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    return given;
}
#else
#define TILES 0
static bool have_tiles() { return false; }
#endif

#if TILES
static void shape_tiles(int rows) {
    const int first = std::min(rows, TILE), second = std::max(rows - TILE, 1);
    const int heights[8] = {first, first, second, second, first, second, TILE, TILE};
#if defined(EMULATE_AMX)
    for (int n = 0; n < 8; n++) tiles[n].rows = heights[n];
#else
    struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {};
    shape.palette = 1;
    for (int n = 0; n < 8; n++) shape.bytes[n] = 64, shape.rows[n] = heights[n];
    _tile_loadconfig(&shape);
#endif
}

template <int ROWS>
static void multiply_tiled(Vec (&acc)[ROWS][2], const bf16* x, long stride, const bf16* w, long inner, const char* next,
                           long pace) {
    constexpr bool TWO = ROWS > TILE;
    constexpr long WIDE = 4 * PANEL;  // bytes of a row of sums, and of a pair of inputs' weights
    char* sums = (char*)acc;
    shape_tiles(ROWS);
    load_tile(0, sums, WIDE);
    load_tile(1, sums + 64, WIDE);
    if (TWO) {
        load_tile(2, sums + TILE * WIDE, WIDE);
        load_tile(3, sums + TILE * WIDE + 64, WIDE);
    }
    for (long k = 0; k < inner; k += 2 * TILE, w += 2 * TILE * PANEL, next += TILE * pace) {
        for (long i = 0; i < TILE * pace; i += 64) __builtin_prefetch(next + i);
        load_tile(6, w, WIDE);
        load_tile(7, (const char*)w + 64, WIDE);
        load_tile(4, x + k, 2 * stride);
        multiply_tiles(0, 4, 6);
        multiply_tiles(1, 4, 7);
        if (TWO) {
            load_tile(5, x + TILE * stride + k, 2 * stride);
            multiply_tiles(2, 5, 6);
            multiply_tiles(3, 5, 7);
        }
    }
    store_tile(0, sums, WIDE);
    store_tile(1, sums + 64, WIDE);
    if (TWO) {
        store_tile(2, sums + TILE * WIDE, WIDE);
        store_tile(3, sums + TILE * WIDE + 64, WIDE);
    }
}
#endif

enum Ending { STORE, ADD, SWIGLU };

template <class T>
struct Product {
    const T *x, *w;
    const float* bias;
    void* out;
    long rows, inner, columns, ending;
};

template <class T>
static long panel_bytes(const Product<T>& p) {
    return PANEL * sizeof(T) * (std::is_same<T, float>::value ? p.inner : p.inner + p.inner % 2);
}

template <class T>
static bool on_tiles(const Product<T>& p) {
    return TILES && std::is_same<T, bf16>::value && p.inner % (2 * TILE) == 0 && have_tiles();
}

INLINE Vec swiglu(Vec gate, Vec up) { return gate / (1.0f + exponential(-gate)) * up; }

template <class T, int ROWS>
static void tile(const Product<T>& p, long row, long panel, const char* next, long pace) {
    Vec acc[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        for (int half = 0; half < 2; half++)
            acc[r][half] = p.bias ? load(p.bias + panel * PANEL + half * LANES) : Vec{};
    const T *x = p.x + row * p.inner, *w = (const T*)((const char*)p.w + panel * panel_bytes(p));
#if TILES
    if constexpr (std::is_same<T, bf16>::value)
        if (on_tiles(p)) multiply_tiled<ROWS>(acc, x, p.inner, w, p.inner, next, pace);
#endif
    if constexpr (ROWS <= MOST_ROWS)
        if (!on_tiles(p)) multiply<ROWS>(acc, x, p.inner, w, p.inner, next, pace);
    for (int r = 0; r < ROWS; r++) {
        if (p.ending == SWIGLU) {
            Vec result = swiglu(acc[r][0], acc[r][1]);
            long column = panel * LANES, count = std::min<long>(LANES, p.columns - column);
            T* out = (T*)p.out + (row + r) * p.columns + column;
            for (long c = 0; c < count; c++) out[c] = narrow(result[c], T{});
            continue;
        }
        for (int half = 0; half < 2; half++) {
            long column = panel * PANEL + half * LANES, count = std::min<long>(LANES, p.columns - column);
            float* out = (float*)p.out + (row + r) * p.columns + column;
            Vec result = acc[r][half];
            if (count == LANES)
                store(out, p.ending == ADD ? load(out) + result : result);
            else
                for (long c = 0; c < count; c++) out[c] = p.ending == ADD ? out[c] + result[c] : result[c];
        }
    }
}

template <class T, int... N>
static void product(const Product<T>& p, std::integer_sequence<int, N...>) {
    typedef void (*Tiled)(const Product<T>&, long, long, const char*, long);
    static const Tiled by_rows[] = {nullptr, tile<T, N + 1>...};
    const long width = p.ending == SWIGLU ? LANES : PANEL, panels = (p.columns + width - 1) / width;
    const long most = on_tiles(p) ? 2 * TILE : MOST_ROWS, parts = (p.rows + most - 1) / most;
    const long bytes = panel_bytes(p);
#pragma omp parallel for schedule(static)
    for (long panel = 0; panel < panels; panel++)
        for (long part = 0; part < parts; part++) {
            const long begin = p.rows * part / parts, end = p.rows * (part + 1) / parts;
            const char* next = (const char*)p.w + (panel + 1) * bytes + bytes * part / parts;
            by_rows[end - begin](p, begin, panel, next, PANEL * 4 / parts);
        }
}

// ---- Small operations ----

template <class T>
static void norm_row(const float* x, const float* weight, float eps, T* out, long width) {
    Vec squares{};
    long k = 0;
    for (; k + LANES <= width; k += LANES) squares += load(x + k) * load(x + k);
    float total = sum(squares);
    for (; k < width; k++) total += x[k] * x[k];
    float scale = 1.0f / std::sqrt(total / width + eps);
    for (k = 0; k < width; k++) out[k] = narrow(x[k] * scale * weight[k], T{});
}

template <class T>
static void rms_norm(const float* x, const float* weight, float eps, T* out, long rows, long width) {
#pragma omp parallel for schedule(static) if (rows > 4)
    for (long row = 0; row < rows; row++) norm_row(x + row * width, weight, eps, out + row * width, width);
}

struct Heads {
    long queries, keys, size;  // query heads, key/value heads, head_dim
};

// Turn q and k by position (entry i with entry i + head_dim / 2), and put k and v into their slots.
template <class T>
static void rope_and_store(float* qkv, const float* cos, const float* sin, const float* q_norm, const float* k_norm,
                           float eps, const int64_t* slots, T* cache, long rows, Heads h) {
    long width = (h.queries + 2 * h.keys) * h.size, half = h.size / 2;
#pragma omp parallel for schedule(static) if (rows > 4)
    for (long row = 0; row < rows; row++) {
        float* x = qkv + row * width;
        const float *c = cos + row * half, *s = sin + row * half;
        for (long head = 0; head < h.queries + h.keys; head++) {
            float* y = x + head * h.size;
            const float* weight = head < h.queries ? q_norm : k_norm;
            if (weight) norm_row(y, weight, eps, y, h.size);
            for (long i = 0; i < half; i++) {
                float a = y[i], b = y[i + half];
                y[i] = a * c[i] - b * s[i];
                y[i + half] = b * c[i] + a * s[i];
            }
        }
        T* place = cache + slots[row] * 2 * h.keys * h.size;
        const float* k = x + h.queries * h.size;  // v follows k here and in the slot
        for (long i = 0; i < 2 * h.keys * h.size; i++) place[i] = narrow(k[i], T{});
    }
}

// ---- Attention ----

struct Task {  // up to a few neighbouring queries of one request
    int64_t request, row, count, position;  // first row on the token axis, how many, position of the first
};

template <class T>
struct Attention {
    const float* qkv;
    const T* cache;  // [slots, 2, keys, size]
    const int64_t* tables;
    T* out;
    long table_width, block_size;
    Heads h;
};

#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;  // bf16 keys are multiplied as they are
#else
constexpr bool PAIRS = false;
#endif

// One head's keys or values of LANES tokens, each filled up to whole vectors. Where they lie like that in the cache
// they stay there; otherwise they are copied. Tokens from `count` on are the first one again. The tokens behind these
// (`ahead`) are asked for, so that they come while these are computed with.
template <class T, class U>
static void fetch(const T* const* slots, const T* const* ahead, long count, long offset, long size, long padded,
                  U* copies, const U* (&rows)[LANES]) {
    for (long j = 0; j < LANES; j++) {
        for (const char *p = (const char*)(ahead[j] + offset), *end = p + size * sizeof(T); p < end; p += 64)
            __builtin_prefetch(p, 0, 2);
        const T* from = slots[j] + offset;
        if constexpr (std::is_same<T, U>::value)
            if (size == padded) {
                rows[j] = from;
                continue;
            }
        rows[j] = copies + (j < count ? j * padded : 0);
        if constexpr (std::is_same<U, float>::value)
            if (j < count) {
                long i = 0;
                for (U* to = copies + j * padded; i + LANES <= size; i += LANES) store(to + i, load(from + i));
                for (; i < size; i++) copies[j * padded + i] = from[i];
            }
    }
}

// Parts of the products of one query with LANES keys: the lanes of each add up to one score.
INLINE void multiply_keys(Vec (&dots)[LANES], const float* q, const float* const* keys, long width) {
    for (long i = 0; i < width; i += LANES) {
        Vec part = load(q + i);
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) dots[j] += part * load(keys[j] + i);
    }
}

INLINE void multiply_keys(Vec (&dots)[LANES], const bf16* q, const bf16* const* keys, long width) {
    for (long i = 0; i < width; i += 2 * LANES) {
        Ints part = *(const LooseInts*)(q + i);
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) add_pair(dots[j], part, *(const LooseInts*)(keys[j] + i));
    }
}

// Take up to LANES more tokens into the running softmax of one query. Its state: the largest score so far, then a
// vector of sums of shares, then the values weighted with the shares.
template <int WIDTH, class Key>
INLINE void attend(const Key* q, const Key* const* keys, const float* const* values, long count, long padded,
                   float* state) {
    const long width = WIDTH ? WIDTH : padded;  // known to the compiler for the usual sizes of a head
    Vec dots[LANES] = {};
    multiply_keys(dots, q, keys, width);
    Ints seen = lane() < (int)count;
    Vec scores = seen ? sums(dots) : all(-INFINITY);
    float highest = std::max(state[0], largest(scores));
    Vec kept = exponential(all(state[0] - highest)), share = seen ? exponential(scores - highest) : Vec{};
    state[0] = highest;
    store(state + LANES, kept * load(state + LANES) + share);
    constexpr int VECS = WIDTH ? WIDTH / LANES : 1;
    for (long i = 0; i < width; i += VECS * LANES) {
        float* result = state + 2 * LANES + i;
        Vec mixed[VECS];
#pragma GCC unroll 32
        for (int v = 0; v < VECS; v++) mixed[v] = kept * load(result + v * LANES);
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++)
#pragma GCC unroll 32
            for (int v = 0; v < VECS; v++) mixed[v] += share[j] * load(values[j] + i + v * LANES);
#pragma GCC unroll 32
        for (int v = 0; v < VECS; v++) store(result + v * LANES, mixed[v]);
    }
}

template <class T, int WIDTH>
static void run(const Attention<T>& a, const Task& task) {
    const long size = a.h.size, group = a.h.queries / a.h.keys, padded = (size + LANES - 1) / LANES * LANES;
    const long width = (a.h.queries + 2 * a.h.keys) * size, step = 2 * LANES + padded, slot = 2 * a.h.keys * size;
    const long rows = task.count * a.h.queries, end = task.position + task.count;
    const float scale = 1.0f / std::sqrt((float)size);
    typedef typename std::conditional<PAIRS && WIDTH % (2 * LANES) == 0 && WIDTH, T, float>::type Key;
    std::vector<float> state(rows * step), values(LANES * padded);
    std::vector<Key> q(rows * padded), keys(LANES * padded);
    const float* first = a.qkv + task.row * width;
    for (long n = 0; n < rows; n++) {
        const float* from = first + n / a.h.queries * width + n % a.h.queries * size;
        for (long i = 0; i < size; i++) q[n * padded + i] = narrow(from[i] * scale, Key{});
        state[n * step] = -INFINITY;
    }
    auto place = [&](long p) {
        const int64_t block = a.tables[task.request * a.table_width + p / a.block_size];
        return a.cache + (block * a.block_size + p % a.block_size) * slot;
    };
    const T *slots[LANES], *ahead[LANES];
    const Key* k[LANES];
    const float* v[LANES];
    for (long j = 0; j < LANES; j++) ahead[j] = place(std::min(j, end - 1));
    for (long start = 0; start < end; start += LANES) {
        const long count = std::min<long>(LANES, end - start);
        for (long j = 0; j < LANES; j++) {
            slots[j] = ahead[j < count ? j : 0];
            if (start + LANES + j < end) ahead[j] = place(start + LANES + j);
        }
        for (long head = 0; head < a.h.keys; head++) {
            fetch(slots, ahead, count, head * size, size, padded, keys.data(), k);
            fetch(slots, ahead, count, (a.h.keys + head) * size, size, padded, values.data(), v);
            for (long query = 0; query < task.count; query++) {
                const long seen = std::min(count, task.position + query + 1 - start);
                for (long n = query * a.h.queries + head * group, last = n + group; seen > 0 && n < last; n++)
                    attend<WIDTH>(&q[n * padded], k, v, seen, padded, &state[n * step]);
            }
        }
    }
    for (long n = 0; n < rows; n++) {
        const float *mine = &state[n * step], total = sum(load(mine + LANES));
        T* out = a.out + (task.row * a.h.queries + n) * size;
        for (long i = 0; i < size; i++) out[i] = narrow(mine[2 * LANES + i] / total, T{});
    }
}

template <class T>
static void attention(const Attention<T>& a, const Task* tasks, long count) {
    const auto one = a.h.size == 64 ? run<T, 64> : a.h.size == 128 ? run<T, 128> : run<T, 0>;
#pragma omp parallel for schedule(dynamic)
    for (long n = 0; n < count; n++) one(a, tasks[n]);
}

// ---- What Python calls: a name for each type ----

#define EXPORT(T, NAME)                                                                                               \
    extern "C" void product_##NAME(const T* x, const T* w, const float* bias, void* out, long rows, long inner,        \
                                   long columns, long ending) {                                                        \
        product(Product<T>{x, w, bias, out, rows, inner, columns, ending},                                             \
                std::make_integer_sequence<int, TILES && sizeof(T) == 2 ? 2 * TILE : MOST_ROWS>{});                                                         \
    }                                                                                                                  \
    extern "C" void rms_norm_##NAME(const float* x, const float* weight, float eps, T* out, long rows, long width) {   \
        rms_norm(x, weight, eps, out, rows, width);                                                                    \
    }                                                                                                                  \
    extern "C" void rope_and_store_##NAME(float* qkv, const float* cos, const float* sin, const float* q_norm,         \
                                          const float* k_norm, float eps, const int64_t* slots, T* cache, long rows,   \
                                          long queries, long keys, long size) {                                        \
        rope_and_store(qkv, cos, sin, q_norm, k_norm, eps, slots, cache, rows, Heads{queries, keys, size});            \
    }                                                                                                                  \
    extern "C" void attention_##NAME(const float* qkv, const T* cache, const int64_t* tables, T* out,                  \
                                     long table_width, long block_size, long queries, long keys, long size,            \
                                     const Task* tasks, long count) {                                                  \
        Attention<T> a{qkv, cache, tables, out, table_width, block_size, {queries, keys, size}};                       \
        attention(a, tasks, count);                                                                                    \
    }

EXPORT(float, float32)
EXPORT(bf16, bfloat16)

extern "C" long lanes() { return LANES; }

extern "C" const char* made_for() {
    if (have_tiles()) return "AMX tiles and AVX-512";
    if (PAIRS) return "AVX-512 with bf16";
    return LANES == 16 ? "AVX-512" : LANES == 8 ? "AVX2 or AVX" : "vectors of 128 bits";
}
