"""The reader of the text form that ``octavo.ir.printer`` writes (docs/architecture.md)."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from octavo.ir.errors import VerifyError
from octavo.ir.graph import Graph, Origin, Value
from octavo.ir.kv_scheme import KVScheme
from octavo.ir.lexer import Source, Token
from octavo.ir.ops import OpDef, infer_types, op_def, registered_ops
from octavo.ir.ops.aten import OperandRef
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.types import DTYPES, Dim, KVType, QuantType, SlotShape, SymDim, TensorType, Type

_CONSTANTS = {"none": None, "true": True, "false": False}
_FLOATS = ("inf", "-inf", "nan")
_ORIGIN = re.compile(r"(?:hf: (\S+)(?: (?!from:)(\S+))?)? ?(?:from: (.+))?")


def parse_graph(text: str, name: str = "<text>", *, first_line: int = 1) -> Graph:
    """Read one graph. ``name`` and ``first_line`` say where the text stands, for error messages.

    Raises ParseError with file, line, column and a caret for anything that is not a graph, for a
    type on the left that is not what the op gives, and for what the op itself refuses.
    """
    return _Parser(Source(text, name, first_line)).graph()


class _Parser:
    """Recursive descent over the words; one method a construct."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tokens = list(source.tokens())
        self.position = 0
        self.result = Graph("")

    # Words

    @property
    def token(self) -> Token:
        return self.tokens[self.position]

    def fail(self, reason: str, token: Token | None = None) -> NoReturn:
        token = token or self.token
        self.source.fail(reason, token.line, token.column)

    def advance(self) -> Token:
        token = self.token
        self.position += 1
        return token

    def accept(self, text: str) -> bool:
        if self.token.text != text or self.token.kind == "string":
            return False
        self.position += 1
        return True

    def expect(self, *texts: str) -> str:
        for text in texts:
            if self.accept(text):
                return text
        return self.fail(f"expected {' or '.join(f'`{t}`' for t in texts)}, got {self.shown()}")

    def expect_kind(self, kind: str, what: str) -> Token:
        if self.token.kind != kind:
            self.fail(f"expected {what}, got {self.shown()}")
        return self.advance()

    def shown(self) -> str:
        return "the end of the text" if self.token.kind == "end" else f"`{self.token.text}`"

    def items(self, close: str, item: Callable[[], Any]) -> list[Any]:
        """Items with commas between, up to and with the closing mark."""
        found: list[Any] = []
        if self.accept(close):
            return found
        while True:
            found.append(item())
            if self.expect(",", close) == close:
                return found

    # Graph

    def graph(self) -> Graph:
        self.expect("graph")
        self.result.name = self.expect_kind("value", "the graph's name, as in `@llama`").text[1:]
        self.expect("(")
        self.items(")", self.parameter)
        self.expect("{")
        if self.accept("weights"):
            self.expect("{")
            while not self.accept("}"):
                self.node("@")
        while not self.accept("return"):
            self.node("%")
        self.results()
        self.expect("}")
        if self.token.kind != "end":
            self.fail(f"expected nothing after the graph, got {self.shown()}")
        return self.result

    def parameter(self) -> None:
        token, value_type = self.typed_name("a parameter, as in `%x: f32[T, 64]`")
        name = token.text[1:]
        # The comma belongs to the line, so the comment stands where the type ends.
        origin = self.origins(self.tokens[self.position - 1].line, 1)[0]
        if token.text[0] == "%":
            self.result.add_input(name, value_type, origin)
        elif isinstance(value_type, TensorType):
            self.result.append_weight(
                "checkpoint", key=name, type=value_type, name=name, origin=origin
            )
        else:
            self.fail(f"a weight must be a tensor, got {value_type}", token)

    def results(self) -> None:
        if self.token.text == "}":
            return
        self.result.outputs.append(self.operand_value())
        while self.accept(","):
            self.result.outputs.append(self.operand_value())

    # Nodes

    def node(self, sigil: str) -> None:
        names = [self.result_name(sigil)]
        while self.accept(","):
            names.append(self.result_name(sigil))
        self.expect("=")
        op_token = self.expect_kind("word", "an op")
        definition = self.op(op_token)
        operands, given = self.arguments(definition, names[0][1])
        origins = self.origins(self.tokens[self.position - 1].line, len(names))
        attrs = self.checked(op_token, lambda: definition.complete(given))
        self.check_types(op_token, names, operands, attrs)
        if sigil == "@":
            self.check_region(op_token, operands)
        add = self.result.append_weight if sigil == "@" else self.result.append
        texts = [token.text[1:] for token, _ in names]
        while operands and operands[-1] is None:
            operands.pop()  # as passes leave them out
        node = add(definition.name, *operands, **{**attrs, "name": texts})
        for value, origin in zip(node.outputs, origins, strict=True):
            value.origin = origin

    def result_name(self, sigil: str) -> tuple[Token, Type]:
        what = {"@": "a weight, as in `@w: ...`, or `}`", "%": "a result or `return`"}[sigil]
        token, value_type = self.typed_name(what)
        if token.text[0] != sigil:
            region = "the weights region" if sigil == "@" else "the step"
            self.fail(f"expected a name with `{sigil}` in {region}, got `{token.text}`", token)
        return token, value_type

    def typed_name(self, what: str) -> tuple[Token, Type]:
        token = self.expect_kind("value", what)
        if "-" in token.text:
            self.fail("a name is made of letters, digits, `_`, `.` and `~`", token)
        if self.result.has_value(token.text):
            self.fail(f"`{token.text}` is defined twice", token)
        self.expect(":")
        return token, self.type()

    def op(self, token: Token) -> OpDef:
        try:
            return op_def(token.text)
        except VerifyError as error:
            close = difflib.get_close_matches(token.text, registered_ops(), n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            self.fail(f"{error}{hint}", token)

    def arguments(
        self, definition: OpDef, declared: Type
    ) -> tuple[list[Value | None], dict[str, Any]]:
        operands: list[Value | None] = []
        attrs: dict[str, Any] = {}
        implied = {
            name: declared
            for name, parameter in definition.attributes.items()
            if parameter.annotation in ("TensorType", TensorType)
        }

        def argument() -> None:
            if self.tokens[self.position + 1].text == "=":
                name = self.expect_kind("word", "an attribute's name")
                if name.text in attrs:
                    self.fail(f"the attribute {name.text!r} is given twice", name)
                self.expect("=")
                attrs[name.text] = self.attribute()
            elif attrs:
                self.fail("operands come before attributes")
            else:
                operands.append(None if self.accept("none") else self.operand_value())

        self.expect("(")
        self.items(")", argument)
        missing = 0 if definition.variadic else len(definition.operands) - len(operands)
        return operands + [None] * missing, {**implied, **attrs}

    def operand_value(self) -> Value:
        token = self.expect_kind("value", "a value")
        if not self.result.has_value(token.text):
            names = [str(value) for value in self.result.named_values()]
            close = difflib.get_close_matches(token.text, names, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            self.fail(f"`{token.text}` is not defined before this line{hint}", token)
        return self.result.value(token.text)

    def checked(self, token: Token, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except VerifyError as error:
            self.fail(str(error), token)

    def check_types(
        self,
        op_token: Token,
        names: list[tuple[Token, Type]],
        operands: list[Value | None],
        attrs: dict[str, Any],
    ) -> None:
        types = [value.type if value is not None else None for value in operands]
        inferred = self.checked(op_token, lambda: infer_types(op_token.text, types, attrs))
        if len(inferred) != len(names):
            self.fail(f"{op_token.text} gives {len(inferred)} results, not {len(names)}", op_token)
        for (token, declared), actual in zip(names, inferred, strict=True):
            if declared != actual:
                reason = (
                    f"`{token.text}` is declared {declared}, but {op_token.text} gives {actual}"
                )
                self.fail(reason, token)
            if [t.text for t, _ in names].count(token.text) > 1:
                self.fail(f"`{token.text}` is defined twice", token)

    def check_region(self, op_token: Token, operands: list[Value | None]) -> None:
        for value in operands:
            if value is not None and not value.is_weight:
                self.fail(f"a weight cannot depend on the step's {value}", op_token)

    # Types and attributes

    def type(self) -> Type:
        token = self.expect_kind("word", "a type, as in `f32[T, 64]`")
        if token.text == "kv":
            return self.kv_type()
        if self.token.text == "<":
            return self.quant_type(token)
        if token.text not in DTYPES:
            self.fail(f"unknown dtype; expected one of {', '.join(DTYPES)}", token)
        self.expect("[")
        return TensorType(token.text, tuple(self.items("]", self.dim)))

    def quant_type(self, codes: Token) -> QuantType:
        """``int4<1x128, bf16>[64, 128]``, from the first angle bracket on."""
        words = [codes.text]
        while words[-1] != ">":
            if self.token.kind == "end":
                self.expect(">")
            token = self.advance()
            words.append(", " if token.text == "," else token.text)
        scheme = self.checked(codes, lambda: QuantScheme.parse("".join(words)))
        start = self.token
        self.expect("[")
        sizes = self.items("]", lambda: self.integer("a size"))
        if len(sizes) != 2:
            self.fail("expected two sizes, N and K", start)
        return QuantType(scheme, (sizes[0], sizes[1]))

    def kv_type(self) -> KVType:
        self.expect("<")
        token = self.expect_kind("word", "the cache's dtype")
        if token.text not in DTYPES:
            self.fail(f"unknown dtype; expected one of {', '.join(DTYPES)}", token)
        scales = self.kv_scales(token)
        if self.accept(">"):
            return KVType(token.text, (), scales)
        self.expect(",")
        runs = self.items(">", self.slot_run)
        return KVType(token.text, tuple(slot for run in runs for slot in run), scales)

    def kv_scales(self, dtype: Token) -> str | None:
        """The word after the dtype that says what has a scale, if there is one."""
        if self.token.kind != "word":
            return None
        scales = self.advance()
        scheme = f"{dtype.text} {scales.text}"
        return self.checked(scales, lambda: KVScheme.parse(scheme)).scales  # type: ignore[no-any-return]

    def slot_run(self) -> list[SlotShape]:
        """``30 x [3, 64, 64]``; a single slot may go without ``1 x``."""
        count = 1
        if self.token.text != "[":
            count = self.integer("a number of slots")
            self.expect("x")
        start = self.token
        self.expect("[")
        sizes = self.items("]", lambda: self.integer("a size"))
        if len(sizes) != 3:
            self.fail("expected three sizes: KV heads, key dim, value dim", start)
        return [SlotShape(*sizes)] * count

    def integer(self, what: str) -> int:
        token = self.expect_kind("number", what)
        if not token.text.isdigit():
            self.fail(f"expected {what}, got `{token.text}`", token)
        return int(token.text)

    def dim(self) -> Dim:
        token = self.token
        value = self.attribute()
        if not isinstance(value, int | SymDim) or isinstance(value, bool):
            self.fail(f"expected a dim, as in `64`, `T` or `4*T`, got `{token.text}`", token)
        return value

    def attribute(self) -> Any:
        token = self.advance()
        if token.kind == "string":
            return json.loads(token.text)
        if token.kind == "operand":
            return OperandRef(int(token.text[1:]))
        if token.text == "[":
            return tuple(self.items("]", self.attribute))
        if token.kind == "number":
            return self.number(token)
        if token.kind != "word":
            self.fail(
                f"expected a number, string, truth value, dim or list, got {token.text!r}", token
            )
        if token.text in _CONSTANTS:
            return _CONSTANTS[token.text]
        return float(token.text) if token.text in _FLOATS else self.affine(1, token)

    def number(self, token: Token) -> int | float | SymDim:
        if not re.fullmatch(r"[+-]?\d+", token.text):
            return float(token.text)
        if self.accept("*"):
            return self.affine(int(token.text), self.expect_kind("word", "a symbol"))
        return int(token.text)

    def affine(self, scale: int, symbol: Token) -> SymDim:
        offset = 0
        if self.token.kind == "number" and self.token.text[0] in "+-":
            offset = int(self.advance().text)
        return SymDim(symbol.text, scale, offset)

    # Origins

    def origins(self, line: int, count: int) -> list[Origin]:
        """The origins that a line's comment gives to its results; other comments mean nothing."""
        comment = self.source.comments.get(line, "")
        if not comment.startswith(("hf: ", "from: ", "none |")):
            return [Origin()] * count
        found = [_origin(part) for part in comment.split(" | ")]
        if len(found) not in (1, count):
            column = self.source.lines[line].text.rindex("//")
            self.source.fail(f"expected 1 or {count} origins, got {len(found)}", line, column)
        return found if len(found) == count else found * count


def _origin(text: str) -> Origin:
    match = _ORIGIN.fullmatch(text)
    if match is None:
        return Origin()
    module = {"-": None, ".": ""}.get(match[1], match[1])
    values = tuple(match[3].split(", ")) if match[3] else ()
    return Origin(module, match[2], values)
