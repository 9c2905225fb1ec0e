// A management library of two devices, of which the second tells little, and fails once FAIL_FILE exists.
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int gpu, memory; } utilization_t;

static int running;

int nvmlInit_v2(void) { running++; return 0; }
int nvmlShutdown(void) { return running-- > 0 ? 0 : 1; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "Unknown Error"; }
int nvmlDeviceGetCount_v2(unsigned int *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **device) { *device = (void *)(uintptr_t)(i + 1); return 0; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int size) {
  snprintf(uuid, size, "GPU-%d", (int)(uintptr_t)device - 1);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory_t *m) {
  if (access(FAIL_FILE, F_OK) == 0) return 15;
  m->total = 80000000000ull * (uintptr_t)device, m->free = 1, m->used = 60000000000ull;
  return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, utilization_t *u) {
  if ((uintptr_t)device == 2) return 3;
  u->gpu = 97, u->memory = 45;
  return 0;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned int *mw) { return *mw = 412000, 0; }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *c) { return *c = 61 + sensor, 0; }
int nvmlDeviceGetPcieThroughput(void *device, int counter, unsigned int *kbs) {
  if ((uintptr_t)device == 2) return 3;
  return *kbs = counter ? 2000 : 7, 0;
}
