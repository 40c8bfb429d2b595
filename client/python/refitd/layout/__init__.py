"""What a process registers: tensors, the boxes of them that it has, and the memory where they lie."""
