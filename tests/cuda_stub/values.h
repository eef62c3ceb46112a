/* Values of operators, which values.cpp computes on the CPU: what it tells the stub. */
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

/* From now on every kernel has to belong to an operator that gets its values. */
void fake_values_are_on(void);
/* Whether this thread runs an operator's CUDA kernel, whose values come later; returns the answer before. */
int fake_in_operator(int is_inside);
/* Whether this thread may touch the memory of devices, as what a stream does may; returns the answer before. */
int fake_on_device(int is_allowed);
/* The calling process's devices are in error, as after a failed assertion in a kernel. */
void fake_fail(const char *text);
/* What a stream does, and that the host waits for it. */
void fake_stream_do(void *stream, void (*work)(void *), void *data);
void fake_stream_wait(void *stream);

int values_are_on(void);
int is_in_operator(void);

#ifdef __cplusplus
}
#endif
