"""The page's counts of traffic: lab/traffic.py in JavaScript.

Classes of fields, properties and methods, functions, and expressions are translated; a comprehension becomes
Array.from(), a generator a function*. Python's other forms raise KeyError.
"""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "lab" / "traffic.py"
NAMES = {
    **{"True": "true", "False": "false", "None": "undefined", "self": "this", "case": "problem"},
    **{"Dtype.FP32": '"fp32"'},
    **{"max": "Math.max", "min": "Math.min", "math.ceil": "Math.ceil", "sum": "total"},
}
OPERATORS: dict[type, str] = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Mod: "%", ast.BitAnd: "&"},
    **{ast.Eq: "===", ast.USub: "-"},
}
TOTAL = "const total = (numbers) => numbers.reduce((sum, number) => sum + number, 0);"


def javascript() -> str:
    """The module's text; it exports all that lab/traffic.py defines."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    kept = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr))]
    return "\n".join(
        ["// Made from lab/traffic.py.", TOTAL, *(Translation(classes).statement(n) for n in kept)]
    )


class Translation:
    """The translation of a file's statements. classes: the names of those that it defines."""

    def __init__(self, classes: set[str]) -> None:
        self.classes = classes

    def statement(self, node: ast.stmt, inside: bool = False) -> str:
        export = "" if inside else "export "
        match node:
            case ast.Expr(ast.Constant()):  # a docstring
                return ""
            case ast.Expr(ast.Yield(value)):
                return f"yield {self.of(value)};"
            case ast.Return(value):
                return f"return {self.of(value)};"
            case ast.If(test, body):
                return f"if ({self.of(test)}) {{ {self.all(body)} }}"
            case ast.Assign([target], value):
                return f"{export}const {self.of(target)} = {self.of(value)};"
            case ast.FunctionDef(name, arguments, body):
                star = "*" * any(isinstance(each, ast.Yield) for each in ast.walk(node))
                return f"{export}function{star} {name}({self.parameters(arguments)}) {{ {self.all(body)} }}"
            case ast.ClassDef(name, body=body):
                return f"{export}class {name} {{ {self.members(body)} }}"
        raise KeyError(ast.unparse(node))

    def all(self, body: list[ast.stmt]) -> str:
        return " ".join(filter(None, (self.statement(node, inside=True) for node in body)))

    def parameters(self, arguments: ast.arguments) -> str:
        plain = len(arguments.args) - len(arguments.defaults)
        values = ["", *(f" = {self.of(value)}" for value in arguments.defaults)]
        names = [NAMES.get(each.arg, each.arg) for each in arguments.args if each.arg != "self"]
        return ", ".join(f"{name}{values[max(0, i - plain + 1)]}" for i, name in enumerate(names))

    def members(self, body: list[ast.stmt]) -> str:
        """The constructor of a dataclass, its getters and its methods."""
        fields = [node for node in body if isinstance(node, ast.AnnAssign)]
        given = [f"{self.of(f.target)}{f' = {self.of(f.value)}' if f.value else ''}" for f in fields]
        kept = " ".join(f"this.{self.of(field.target)} = {self.of(field.target)};" for field in fields)
        found = [f"constructor({', '.join(given)}) {{ {kept} }}"]
        for node in body:
            if isinstance(node, ast.FunctionDef):
                get = "get " * bool(node.decorator_list)
                found.append(f"{get}{node.name}({self.parameters(node.args)}) {{ {self.all(node.body)} }}")
        return " ".join(found)

    def of(self, node: ast.expr | None) -> str:
        """An expression, in parentheses where it needs them."""
        match node:
            case None:
                return ""
            case ast.Name() | ast.Constant(True | False | None):
                return NAMES.get(ast.unparse(node), ast.unparse(node))
            case ast.Constant(value):
                return repr(value)
            case ast.Attribute(value, name):
                return NAMES.get(ast.unparse(node)) or f"{self.of(value)}.{name}"
            case ast.Subscript(value, index):
                return f"{self.of(value)}[{self.of(index)}]"
            case ast.Tuple(items) | ast.List(items):
                return f"[{', '.join(map(self.of, items))}]"
            case ast.Dict(keys, values):
                return f"{{ {', '.join(f'{self.of(k)}: {self.of(v)}' for k, v in zip(keys, values))} }}"
            case ast.Starred(value):
                return f"...{self.of(value)}"
            case ast.Call(function, arguments):
                made = "new " * (ast.unparse(function) in self.classes)
                return f"{made}{self.of(function)}({', '.join(map(self.of, arguments))})"
            case ast.UnaryOp(operator, value):
                return f"({OPERATORS[type(operator)]}{self.of(value)})"
            case ast.BinOp(left, ast.FloorDiv(), right):
                return f"Math.floor({self.of(left)} / {self.of(right)})"
            case ast.BinOp(left, operator, right):
                return f"({self.of(left)} {OPERATORS[type(operator)]} {self.of(right)})"
            case ast.IfExp(test, right, wrong):
                return f"({self.of(test)} ? {self.of(right)} : {self.of(wrong)})"
            case ast.Compare(left, [ast.NotIn()], [right]):
                return f"!({self.of(left)} in {self.of(right)})"
            case ast.Compare(left, [operator], [right]):
                return f"({self.of(left)} {OPERATORS[type(operator)]} {self.of(right)})"
            case ast.ListComp(element, [ast.comprehension(target, iterable)]):
                return f"Array.from({self.of(iterable)}, ({self.of(target)}) => {self.of(element)})"
        raise KeyError(ast.unparse(node) if node else node)
