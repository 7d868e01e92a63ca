// Raw UCX for `python -m benchmarks transfer`: the same library, worker, endpoint and key as the engine's, with nothing
// around the calls. Compiled when the benchmark runs; the library's functions are handed over as pointers, so that no
// UCX header is needed.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

struct loop {
  void* (*put)(void* endpoint, const void* buffer, size_t count, uint64_t remote, void* key, const void* parameters);
  void* (*flush)(void* endpoint, const void* parameters);
  unsigned (*progress)(void* worker);
  int (*status)(void* request);
  void (*release)(void* request);
  void *worker, *endpoint, *key;
  const void *put_parameters, *flush_parameters;
};

enum { IN_PROGRESS = 1, LOWEST_STATUS = -256 };

// Each operation puts every run (local address, remote address, bytes) and flushes; all are started, then all are
// waited for. Returns 0 or the first error's status.
int run_operations(const struct loop* ucx, const int64_t (*runs)[3], size_t count, size_t operations) {
  void** requests = malloc((count + 1) * operations * sizeof *requests);
  size_t pending = 0;
  int failed = requests ? 0 : -4;
  for (size_t operation = 0; operation < operations && !failed; ++operation)
    for (size_t i = 0; i <= count && !failed; ++i) {
      void* returned = i < count ? ucx->put(ucx->endpoint, (const void*)runs[i][0], (size_t)runs[i][2],
                                            (uint64_t)runs[i][1], ucx->key, ucx->put_parameters)
                                 : ucx->flush(ucx->endpoint, ucx->flush_parameters);
      intptr_t status = (intptr_t)returned;
      if (status < 0 && status > LOWEST_STATUS)
        failed = (int)status;
      else if (status)
        requests[pending++] = returned;
    }
  while (pending) {
    ucx->progress(ucx->worker);
    size_t kept = 0;
    for (size_t i = 0; i < pending; ++i) {
      int status = ucx->status(requests[i]);
      if (status == IN_PROGRESS) {
        requests[kept++] = requests[i];
        continue;
      }
      ucx->release(requests[i]);
      if (status < 0 && !failed) failed = status;
    }
    pending = kept;
  }
  free(requests);
  return failed;
}
