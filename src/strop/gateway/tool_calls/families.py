"""The families' formats in one table, and how to tell from a chat template which one a model writes.

A family is known by marks of its own in the template's text. Rows are tried from the first to the last, so the more
particular stand before the more general; what no row knows is plain text, in which nothing is a call.

Left out: Llama's built-in tools (`<|python_tag|>` with code after it), tools of gpt-oss other than functions.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from strop.gateway.tool_calls.arguments import NestedTags, Python, Quoted, Tags
from strop.gateway.tool_calls.bodies import Gemma, Nested, headed, parameters, parse_json_call
from strop.gateway.tool_calls.form import ANY_NAME, ID, ONE, ZERO, CallForm
from strop.gateway.tool_calls.reader import Grammar
from strop.gateway.tool_calls.syntax import JsonCalls, PythonCalls, TaggedCalls, keyed, single

NAME = ANY_NAME

REASONING = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
)
"""Marks around reasoning that any family may have: it does if its template knows the closing one."""


def find(template: str) -> Grammar:
    """The format in which a chat template's model writes.

    >>> find("... <tool_call> ...").name, find("... {{ message.content }} ...").name
    ('hermes', 'plain')
    """
    known = (family for family in FAMILIES if all(text in template for text in family.known_by))
    found = next(known, PLAIN)
    return found if found.thoughts else replace(found, thoughts=tuple(p for p in REASONING if p[1] in template))


def hermes_like(format: Grammar) -> Grammar:
    """Calls as Hermes has them, thoughts as another format does."""
    return replace(HERMES, thoughts=format.thoughts)


def _xml(begin: str, end: str) -> TaggedCalls:
    """Qwen3-Coder's tags, which others wrap differently."""
    value = r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>(?=\s*(?:<parameter=|\Z))"
    return TaggedCalls("<function=", "</function>", parameters(rf"(?P<name>{NAME})>", value, "\n"), begin, end)


def _invoke(space: str, begin: str, attributes: str = r'name="(?P<key>[^"]+)"') -> TaggedCalls:
    """`<invoke name="...">` with parameters inside, each tag's name after `space`."""
    close = f"</{space}parameter>"
    value = rf"<{space}parameter {attributes}>(?P<value>.*?){close}(?=\s*(?:<{space}parameter |\Z))"
    body = parameters(rf'(?P<name>{NAME})"\s*>', value)
    return TaggedCalls(f'<{space}invoke name="', f"</{space}invoke>", body, f"<{begin}>", f"</{begin}>")


def _json_form(before: str, close: str, between: str | None = "\n") -> CallForm:
    """Objects with a name and arguments, one after the other."""
    return CallForm(before + '{"name": "', '", "arguments": ', close, between=between)


def _list_form(begin: str, end: str = "") -> CallForm:
    """A list of such objects."""
    return CallForm('{"name": "', '", "arguments": ', "}", begin=f"{begin}[", between=", ", end=f"]{end}")


def _python_form(begin: str, end: str) -> CallForm:
    return CallForm("", "", begin=begin, between=", ", end=end, arguments=Python(), names=r"[A-Za-z_][\w.\-]*")


def _gemma_form(before: str, close: str, mark: str) -> CallForm:
    return CallForm(before, "", close, between="", arguments=Quoted(mark, close), names=r"[\w.\-]+")


def _function_form(begin: str, end: str) -> CallForm:
    """Qwen3-Coder's tags, each call in a frame of its own."""
    tags = Tags("<parameter={key}>\n", "\n</parameter>\n", unsaid=["</function>"])
    return CallForm(f"{begin}<function=", ">\n", f"</function>{end}", arguments=tags)


def _pairs_form(suffix: str, after: str) -> CallForm:
    """GLM's pairs of keys and values."""
    key, value, call = (f"{name}{suffix}>" for name in ("arg_key", "arg_value", "tool_call"))
    tags = Tags(f"<{key}{{key}}</{key}\n<{value}", f"</{value}\n", unsaid=[f"</{call}"])
    section = (f"<tool_calls{suffix}>\n", f"\n</tool_calls{suffix}>") if suffix else ("", "")
    return CallForm(f"<{call}", after, f"</{call}", begin=section[0], end=section[1], arguments=tags)


def _dsml(name: str, begin: str) -> Grammar:
    return Grammar(
        name=name,
        known_by=("｜DSML｜", f"{begin}>"),
        syntax=_invoke("｜DSML｜", f"｜DSML｜{begin}", r'name="(?P<key>[^"]+)" string="(?P<kind>true|false)"'),
        inner=("｜DSML｜",),
        form=CallForm(
            '<｜DSML｜invoke name="',
            '">\n',
            "</｜DSML｜invoke>",
            begin=f"\n\n<｜DSML｜{begin}>\n",
            end=f"\n</｜DSML｜{begin}>",
            arguments=Tags(
                '<｜DSML｜parameter name="{key}" string="{kind}">',
                "</｜DSML｜parameter>\n",
                kinds=("true", "false"),
                unsaid=["</｜DSML｜invoke>"],
            ),
        ),
    )


def _arguments(suffix: str) -> TaggedCalls:
    """GLM's pairs of keys and values."""
    key = rf"<arg_key{suffix}>(?P<key>.*?)</arg_key{suffix}>"
    value = rf"<arg_value{suffix}>(?P<value>.*?)</arg_value{suffix}>(?=\s*(?:<arg_key{suffix}>|\Z))"
    body = parameters(rf"\s*(?P<name>{NAME})(?:<tool_sep{suffix}>)?", rf"{key}\s*{value}")
    section = (f"<tool_calls{suffix}>", f"</tool_calls{suffix}>") if suffix else ()
    return TaggedCalls(f"<tool_call{suffix}>", f"</tool_call{suffix}>", body, *section)


_DEEPSEEK = TaggedCalls(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    headed(
        r"(?:function<｜tool▁sep｜>)?"
        rf"(?P<name>{NAME})\s*(?:\n```json\n|<｜tool▁sep｜>)(?P<json>\{{.*\}})(?:\s*```)?"
    ),
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
)
_KIMI_K2 = (
    r"(?P<id>(?:functions\.)?(?P<name>[^\s<>:]+)(?::\d+)?)"
    r"\s*<\|tool_call_argument_begin\|>\s*(?P<json>\{.*\})"
)
_KIMI_K3 = parameters(
    rf'(?P<name>{NAME})"[^<]*<\|sep\|>',
    r'<\|open\|>argument key="(?P<key>[^"]+)" type="(?P<kind>\w+)"<\|sep\|>(?P<value>.*?)<\|close\|>argument<\|sep\|>',
)
_MINICPM = parameters(
    rf'(?P<name>{NAME})">',
    r'<param name="(?P<key>[^"]+)">(?:<!\[CDATA\[(?P<raw>.*?)\]\]>|(?P<value>.*?))</param>',
)
_SOLAR = rf"(?P<id>[^<]*)<\|tool_call:name\|>(?P<name>{NAME})<\|tool_call:args\|>(?P<json>\{{.*\}})"
_MISTRAL_ID = "[A-Za-z0-9]{9}"  # others its templates refuse
_MISTRAL = JsonCalls(
    ("[TOOL_CALLS]",),
    keyed("name", "arguments", id=_MISTRAL_ID),
    header=re.compile(rf"({NAME})(?:\[CALL_ID\](?:(?P<id>{_MISTRAL_ID})|\w+))?\[ARGS\]\s*"),
)
_ROOM = "]<]minimax[>["

PLAIN = Grammar(name="plain")

HERMES = Grammar(
    name="hermes",
    known_by=("<tool_call>",),
    syntax=TaggedCalls("<tool_call>", "</tool_call>", parse_json_call),
    form=_json_form("<tool_call>\n", "}\n</tool_call>"),
)

FAMILIES = (
    Grammar(
        name="harmony",
        known_by=("<|channel|>", "<|message|>", "analysis"),
        syntax=JsonCalls(
            tuple(
                f"<|{before} to=functions."
                for before in ("start|>assistant", "channel|>commentary", "channel|>analysis")
            ),
            item=None,
            header=re.compile(rf"({NAME})[^{{]*<\|message\|>\s*"),
        ),
        thoughts=(("<|channel|>analysis<|message|>", "<|end|>"),),
        frames=("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|end|>"),
        inner=("<|constrain|>",),
        form=CallForm(
            " to=functions.",
            "<|channel|>commentary json<|message|>",
            between=None,
            told_in="<|channel|>",
            told_after=" <|constrain|>json<|message|>",
        ),
        words=("<|channel|>final<|message|>", ""),
        after_thought="<|start|>assistant",
    ),
    Grammar(
        name="muse",
        known_by=("<atem:function_calls>",),
        syntax=_invoke("atem:", "atem:function_calls"),
        thoughts=(("to=self<|message|>", "<|eom|>"),),
        frames=("<|start|>assistant", "to=user<|message|>", "to={tool}<|message|>", "<|eom|>"),
    ),
    Grammar(
        name="kimi-k3",
        known_by=("<|open|>", "<|close|>", "<|sep|>"),
        syntax=TaggedCalls(
            '<|open|>call tool="', "<|close|>call<|sep|>", _KIMI_K3, "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
        ),
        thoughts=(("<|open|>think<|sep|>", "<|close|>think<|sep|>"),),
        frames=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        words=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        form=CallForm(
            '<|open|>call tool="',
            f'" index="{ONE}"<|sep|>',
            "<|close|>call<|sep|>",
            begin="<|open|>tools<|sep|>",
            between="",
            end="<|close|>tools<|sep|>",
            arguments=Tags(
                '<|open|>argument key="{key}" type="{kind}"<|sep|>',
                "<|close|>argument<|sep|>",
                kinds=("string", "{json}"),
                unsaid=["<|close|>call<|sep|>"],
            ),
        ),
    ),
    Grammar(
        name="gemma4",
        known_by=("<|tool_call>call:",),
        syntax=TaggedCalls("<|tool_call>", "<tool_call|>", Gemma('<|"|>')),
        inner=('<|"|>', "<|channel>"),
        form=_gemma_form("<|tool_call>call:", "<tool_call|>", '<|"|>'),
    ),
    Grammar(
        name="functiongemma",
        known_by=("<start_function_call>",),
        syntax=TaggedCalls("<start_function_call>", "<end_function_call>", Gemma("<escape>", texts=True)),
        inner=("<escape>",),
        form=_gemma_form("<start_function_call>call:", "<end_function_call>", "<escape>"),
    ),
    Grammar(
        name="minimax-m3",
        known_by=(_ROOM,),
        syntax=TaggedCalls(
            f'{_ROOM}<invoke name="',
            f"{_ROOM}</invoke>",
            Nested(re.compile(rf'(?P<name>{NAME})">'), _ROOM),
            f"{_ROOM}<tool_call>",
            f"{_ROOM}</tool_call>",
        ),
        inner=(_ROOM,),
        form=CallForm(
            f'{_ROOM}<invoke name="',
            '">',
            f"{_ROOM}</invoke>",
            begin=f"{_ROOM}<tool_call>\n",
            end=f"\n{_ROOM}</tool_call>",
            arguments=NestedTags(_ROOM),
        ),
    ),
    Grammar(
        name="minimax",
        known_by=("<minimax:tool_call>",),
        syntax=_invoke("", "minimax:tool_call"),
        form=CallForm(
            '<invoke name="',
            '">\n',
            "</invoke>",
            begin="<minimax:tool_call>\n",
            end="\n</minimax:tool_call>",
            arguments=Tags('<parameter name="{key}">', "</parameter>\n", unsaid=["</invoke>"]),
        ),
    ),
    _dsml("deepseek-v3.2", "function_calls"),
    _dsml("deepseek-v4", "tool_calls"),
    Grammar(
        name="deepseek-v3",
        known_by=("<｜tool▁calls▁begin｜>", "```json"),
        syntax=_DEEPSEEK,
        inner=("<｜tool▁sep｜>",),
        form=CallForm(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    Grammar(
        name="deepseek-v3.1",
        known_by=("<｜tool▁calls▁begin｜>",),
        syntax=_DEEPSEEK,
        inner=("<｜tool▁sep｜>",),
        form=CallForm(
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>",
            between="",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    Grammar(
        name="kimi-k2",
        known_by=("<|tool_calls_section_begin|>",),
        syntax=TaggedCalls(
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            headed(_KIMI_K2),
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
        ),
        inner=("<|tool_call_argument_begin|>",),
        form=CallForm(
            "<|tool_call_begin|>functions.",
            f":{ZERO}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            begin="<|tool_calls_section_begin|>",
            between="",
            end="<|tool_calls_section_end|>",
            names=r"[^\s<>:]+",
        ),
    ),
    Grammar(
        name="solar",
        known_by=("<|tool_call:begin|>",),
        syntax=TaggedCalls("<|tool_call:begin|>", "<|tool_call:end|>", headed(_SOLAR), "<|tool_calls|>"),
        thoughts=(("<|think|>", "<|end|>"),),
        frames=("<|begin|>assistant", "<|content|>", "<|end|>"),
        inner=("<|tool_call:name|>", "<|tool_call:args|>"),
        words=("<|content|>", ""),
        after_thought="<|begin|>assistant",
        form=CallForm(
            f"<|tool_call:begin|>{ID}<|tool_call:name|>",
            "<|tool_call:args|>",
            "<|tool_call:end|>",
            begin="<|tool_calls|>",
            between="",
        ),
    ),
    Grammar(
        name="hy3",
        known_by=("'<tool_call{}>'.format(", ":opensource"),
        syntax=_arguments(":opensource"),
        thoughts=(("<think:opensource>", "</think:opensource>"),),
        inner=tuple(f"<{tag}:opensource>" for tag in ("arg_key", "/arg_key", "arg_value", "/arg_value", "tool_sep")),
        form=_pairs_form(":opensource", "<tool_sep:opensource>\n"),
    ),
    Grammar(
        name="command",
        known_by=("<|START_ACTION|>",),
        syntax=JsonCalls(("<|START_ACTION|>",), keyed("tool_name", "parameters"), ("<|END_ACTION|>",)),
        frames=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        words=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        form=CallForm(
            f'{{"tool_call_id": "{ZERO}", "tool_name": "',
            '", "parameters": ',
            "}",
            begin="<|START_ACTION|>[\n    ",
            between=",\n    ",
            end="\n]<|END_ACTION|>",
        ),
    ),
    Grammar(
        name="command-r",
        known_by=("Action:", "```json", '"tool_name"'),
        syntax=JsonCalls(("Action:\n```json", "Action: ```json"), keyed("tool_name", "parameters"), ("```",)),
        form=CallForm(
            '{\n        "tool_name": "',
            '",\n        "parameters": ',
            "\n    }",
            begin="Action:\n```json\n[\n    ",
            between=",\n    ",
            end="\n]```",
        ),
    ),
    Grammar(
        name="seed",
        known_by=("<seed:tool_call>",),
        syntax=_xml("<seed:tool_call>", "</seed:tool_call>"),
        form=_function_form("<seed:tool_call>\n", "\n</seed:tool_call>"),
    ),
    Grammar(
        name="qwen-xml",
        known_by=("<function=", "<parameter="),
        syntax=_xml("<tool_call>", "</tool_call>"),
        form=_function_form("<tool_call>\n", "\n</tool_call>"),
    ),
    Grammar(
        name="functionary-v3.1",
        known_by=("<function=", "</function>"),
        syntax=TaggedCalls("<function=", "</function>", headed(rf"(?P<name>{NAME})>(?P<json>.*)")),
        form=CallForm("<function=", ">", "</function>", between=""),
    ),
    Grammar(
        name="functionary-v3.2",
        known_by=(">>>all",),
        syntax=JsonCalls((">>>",), item=None, header=re.compile(rf"({NAME})\n\s*")),
        frames=(">>>all\n",),
        form=CallForm("", "\n", between=">>>"),
        words=("all\n", ""),
    ),
    Grammar(
        name="minicpm",
        known_by=('<function name="', "<param name="),
        syntax=TaggedCalls('<function name="', "</function>", _MINICPM),
        inner=("<function", "<param", "</param>"),
        form=CallForm(
            '<function name="',
            '">',
            "</function>",
            arguments=Tags(
                '<param name="{key}">{kind}',
                "</param>",
                kinds=("", ""),
                raw=("<![CDATA[", "]]>"),
                unsaid=["</function>"],
            ),
        ),
    ),
    Grammar(
        name="glm",
        known_by=("<arg_key>",),
        syntax=_arguments(""),
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        form=_pairs_form("", "\n"),
    ),
    Grammar(
        name="apertus",
        known_by=("<|tools_prefix|>",),
        syntax=JsonCalls(("<|tools_prefix|>",), single),
        form=CallForm('{"', '": ', "}", begin="<|tools_prefix|>[", between=", ", end="]"),
    ),
    Grammar(
        name="nemotron",
        known_by=("<TOOLCALL>",),
        syntax=JsonCalls(("<TOOLCALL>",), closes=("</TOOLCALL>",)),
        form=_list_form("<TOOLCALL>", "</TOOLCALL>"),
    ),
    Grammar(
        name="hunyuan",
        known_by=("<tool_calls>[",),
        syntax=JsonCalls(("<tool_calls>",), keyed("name", "arguments", id=".+"), closes=("</tool_calls>",)),
        form=_list_form("<tool_calls>", "</tool_calls>"),
    ),
    Grammar(
        name="mistral-v11-ids",
        known_by=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        syntax=_MISTRAL,
        inner=("[ARGS]", "[CALL_ID]"),
        form=CallForm("[TOOL_CALLS]", f"[CALL_ID]{ID}[ARGS]", between=""),
    ),
    Grammar(
        name="mistral-v11",
        known_by=("[TOOL_CALLS]", "[ARGS]"),
        syntax=_MISTRAL,
        inner=("[ARGS]",),
        form=CallForm("[TOOL_CALLS]", "[ARGS]", between=""),
    ),
    Grammar(
        name="mistral-v3",
        known_by=("[TOOL_CALLS] [",),
        syntax=_MISTRAL,
        form=_list_form("[TOOL_CALLS] "),
    ),
    Grammar(
        name="mistral",
        known_by=("[TOOL_CALLS]",),
        syntax=_MISTRAL,
        form=_list_form("[TOOL_CALLS]"),
    ),
    Grammar(
        name="granite",
        known_by=("<|tool_call|>",),
        syntax=JsonCalls(("<|tool_call|>",)),
        frames=("<response>", "</response>"),
        form=_list_form("<|tool_call|>"),
    ),
    Grammar(
        name="granite-20b",
        known_by=("<function_call>",),
        syntax=JsonCalls(("<function_call>",)),
        form=_json_form("<function_call> ", "}"),
    ),
    Grammar(
        name="gigachat",
        known_by=("<|role_sep|>", "<|function_call|>"),
        syntax=JsonCalls(("<|function_call|>",)),
        form=_json_form("<|function_call|>", "}", None),
    ),
    Grammar(
        name="gigachat-3.0",
        known_by=("<|role_sep|>", "function call"),
        syntax=JsonCalls(("function call<|role_sep|>\n",)),
    ),
    Grammar(
        name="phi4-mini",
        known_by=("functools[", "<|end|>"),
        syntax=JsonCalls(("functools[",), bare="{["),
        form=_list_form("functools"),
    ),
    Grammar(
        name="functools",
        known_by=("functools[",),
        syntax=JsonCalls(("functools[",)),
        form=_list_form("functools"),
    ),
    HERMES,
    *(
        Grammar(
            name="lfm2",
            known_by=known_by,
            syntax=PythonCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",)),
            form=_python_form("<|tool_call_start|>[", "]<|tool_call_end|>"),
        )
        for known_by in (("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [", "keep_past_thinking"))
    ),
    Grammar(
        name="pythonic",
        known_by=("[func_name1(",),
        syntax=PythonCalls(("<|python_start|>",), ("<|python_end|>",)),
        form=_python_form("[", "]"),
    ),
    Grammar(
        name="xlam",
        known_by=('[{"name": "tool_call_name", "arguments":',),
        syntax=JsonCalls((), bare="["),
        form=_list_form(""),
    ),
    Grammar(
        name="llama-json",
        known_by=('{"name": ', '"parameters": '),
        syntax=JsonCalls(("<|python_tag|>",), keyed("name", "parameters", "arguments"), bare="{["),
        form=CallForm('{"name": "', '", "parameters": ', "}", between="; "),
    ),
)
"""Tried in this order."""
