#include "textflag.h"

// func Prefetch(lines []unsafe.Pointer)
TEXT ·Prefetch(SB), NOSPLIT, $0-24
	MOVQ lines_base+0(FP), SI
	MOVQ lines_len+8(FP), CX
	TESTQ CX, CX
	JLE  done

next:
	MOVQ (SI), AX
	MOVBLZX (AX), DX
	ADDQ $8, SI
	DECQ CX
	JNZ  next

done:
	RET
