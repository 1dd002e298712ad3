"""`anysize bench`: what images of many sizes cost, and what is done against it, side by side."""
