#include "textflag.h"

// func Prefetch(lines []unsafe.Pointer)
TEXT ·Prefetch(SB), NOSPLIT, $0-24
	MOVD lines_base+0(FP), R0
	MOVD lines_len+8(FP), R1
	CBZ  R1, done

next:
	MOVD.P 8(R0), R2
	MOVBU (R2), R3
	SUB  $1, R1
	CBNZ R1, next

done:
	RET
