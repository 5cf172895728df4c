"""The page's counts of traffic: lab/traffic.py in JavaScript.

FORMS has a template for each form of Python that is translated; another one raises KeyError. A class of
fields gets a constructor that takes them in their order.
"""

import ast
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "lab" / "traffic.py"
FORMS: dict[type, str] = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Mod: "%", ast.BitAnd: "&"},
    **{ast.USub: "-", ast.Eq: "===", ast.Load: "", ast.Store: ""},
    ast.Assign: "const {targets} = {value};",
    ast.Attribute: "{value}.{attr}",
    ast.BinOp: "({left} {op} {right})",
    ast.Call: "{func}({args})",
    ast.Compare: "({left} {ops} {comparators})",
    ast.Expr: "{value};",
    ast.If: "if ({test}) {{ {body} }}",
    ast.IfExp: "({test} ? {body} : {orelse})",
    ast.List: "[{elts}]",
    ast.Name: "{id}",
    ast.Return: "return {value};",
    ast.Starred: "...{value}",
    ast.Subscript: "{value}[{slice}]",
    ast.Tuple: "[{elts}]",
    ast.UnaryOp: "({op}{operand})",
    ast.Yield: "yield {value}",
}
NAMES = {
    **{"True": "true", "False": "false", "None": "undefined", "self": "this", "case": "problem"},
    **{"max": "Math.max", "min": "Math.min", "math.ceil": "Math.ceil", "sum": "total"},
    **{"Dtype.FP32": '"fp32"'},
}
TOTAL = "const total = (numbers) => numbers.reduce((sum, number) => sum + number, 0);"


def javascript() -> str:
    """The module's text; it exports all that lab/traffic.py defines."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    definitions = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr))]
    exports = [f"export {translated(node)}" for node in definitions]
    return "\n".join(["// Made from lab/traffic.py.", TOTAL, *exports])


def translated(node: Any) -> str:
    """A node, a list of nodes or a name. Expressions have parentheses where they need them."""
    match node:
        case list():
            return (" " if node and isinstance(node[0], ast.stmt) else ", ").join(map(translated, node))
        case ast.Expr(ast.Constant()):  # a docstring
            return ""
        case ast.expr() if ast.unparse(node) in NAMES:
            return NAMES[ast.unparse(node)]
        case ast.Constant(value):
            return repr(value)
        case ast.BinOp(left, ast.FloorDiv(), right):
            return f"Math.floor({translated(left)} / {translated(right)})"
        case ast.Compare(left, [ast.NotIn()], right):
            return f"!({translated(left)} in {translated(right)})"
        case ast.Call(ast.Name(name), arguments) if name[0].isupper():
            return f"new {name}({translated(arguments)})"
        case ast.Dict(keys, values):
            return f"{{ {', '.join(f'{translated(k)}: {translated(v)}' for k, v in zip(keys, values))} }}"
        case ast.ListComp(element, [ast.comprehension(target, iterable)]):
            return f"Array.from({translated(iterable)}, ({translated(target)}) => {translated(element)})"
        case ast.FunctionDef(name, arguments, body):
            star = "*" if any(isinstance(inner, ast.Yield) for inner in ast.walk(node)) else ""
            return f"function{star} {name}({parameters(arguments)}) {{ {translated(body)} }}"
        case ast.ClassDef(name, body=body):
            return f"class {name} {{ {members(body)} }}"
        case ast.AST():
            parts = {name: translated(value) for name, value in ast.iter_fields(node)}
            return FORMS[type(node)].format(**parts)
    return str(node)


def parameters(arguments: ast.arguments) -> str:
    names = [translated(ast.Name(argument.arg)) for argument in arguments.args]
    defaults = [f" = {translated(value)}" for value in arguments.defaults]
    padded = [""] * (len(names) - len(defaults)) + defaults
    return ", ".join(name + default for name, default in zip(names, padded) if name != "this")


def members(body: list[ast.stmt]) -> str:
    """The constructor of a dataclass, its getters and its methods."""
    fields = [node for node in body if isinstance(node, ast.AnnAssign)]
    parameters = [translated(f.target) + (f" = {translated(f.value)}" if f.value else "") for f in fields]
    assignments = " ".join(f"this.{name} = {name};" for name in map(translated, (f.target for f in fields)))
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    methods = [
        ("get " if f.decorator_list else "") + translated(f).removeprefix("function ") for f in functions
    ]
    return " ".join([f"constructor({', '.join(parameters)}) {{ {assignments} }}", *methods])
