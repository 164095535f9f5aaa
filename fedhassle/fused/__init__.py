"""Operations in fewer kernels than a compiler makes of them, and the rewriting of steps to use them."""
