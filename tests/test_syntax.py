import ast
import gc

from grpolab.syntax import parse_python

SOURCE = "\n".join(f"x{i} = [1, (2, 3)]" for i in range(30))


class Parses:
    """Garbage whose finaliser parses, as one that raises does where Python 3.11 shows its traceback."""

    def __init__(self):
        self.me = self

    def __del__(self):
        ast.parse("f([[1]])")


def test_a_collection_in_the_midst_of_parsing_does_not_break_it():
    before = gc.get_threshold()
    try:
        gc.set_threshold(50)
        for _ in range(20):
            Parses()
            assert ast.dump(parse_python(SOURCE)) and gc.isenabled()
    finally:
        gc.set_threshold(*before)
