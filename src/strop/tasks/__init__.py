"""Where tasks come from (`load`) and which one is next (`sampling`)."""
