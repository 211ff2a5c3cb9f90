"""The line of text that names a problem, read: ``forward-bf16-b1-h32x8-q8192-k8192-d128-causal`` to the fields of a `Problem`."""

from __future__ import annotations

import re

from .masks import COUNTED

OPS = ("forward", "decode", "backward")
DTYPES = ("bf16", "fp16", "fp32")  # of queries and outputs; keys and values in a cache may also be e4m3
EXAMPLE = "forward-bf16-b1-h32x8-q8192-k8192-d128-causal"


class ProblemError(ValueError):
    """A problem that cannot exist, with a sentence that says which field is wrong and what is allowed."""


_HEAD = re.compile(r"b(\d+)-h(\d+)x(\d+)-q(\d+)-k(\d+)-d(\d+)(?:x(\d+))?(?:-(.+))?", re.ASCII)


def fields_of(text: str) -> dict[str, object]:
    """The fields of `Problem` that `text` says. Raises `ProblemError` naming the token that is wrong."""
    if len(text) > 300:
        raise ProblemError(f"a problem is a line of text such as {EXAMPLE}")
    op, _, rest = text.partition("-")
    dtype, _, rest = rest.partition("-")
    match = _HEAD.fullmatch(rest)
    if op not in OPS or dtype not in DTYPES or not match:
        raise ProblemError(
            f"problem {text!r} is malformed: expected OP-DTYPE-bBATCH-hHEADSxKVHEADS-qLEN-kLEN-dHEAD_DIM[-FEATURES], "
            f"op one of {', '.join(OPS)}, dtype one of {', '.join(DTYPES)}; for example {EXAMPLE}")
    fields = dict(zip(("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim"),
                      map(_bounded_int, match.groups()[:6])), op=op, dtype=dtype)
    if match[7]:
        fields["head_dim_v"] = _bounded_int(match[7])
    for token in (match[8] or "").split("-") if match[8] else ():
        _parse_feature(text, token, fields)
    return fields


def _bounded_int(digits: str) -> int:
    return int(digits.lstrip("0")[:12] or 0)  # longer numbers are out of every range anyway; keep int() cheap


_FEATURES = f"causal, {', '.join(f'{token}N' for token in COUNTED)}, softcapX, alibi, sinks, varlen, pageN, packed, " \
            "deterministic, kvDTYPE, outDTYPE"
_FLAGS = {"causal": {"window_right": 0}, "alibi": {"alibi": True}, "sinks": {"sinks": True}, "varlen": {"kv": "varlen"},
          "packed": {"packed_queries": True}, "deterministic": {"deterministic": True}}


_FEATURE = re.compile(rf"({'|'.join(_FLAGS)})|({'|'.join(COUNTED)}|page)(\d+)|(softcap)(\d+(?:\.\d+)?)|(kv|out)([a-z]+\d\w*)",
                      re.ASCII)


def _parse_feature(text: str, token: str, fields: dict) -> None:
    match = _FEATURE.fullmatch(token)
    if not match:
        raise ProblemError(f"problem {text!r}: unknown feature {token!r}; allowed are {_FEATURES}")
    flag, counted, count, softcap, value, typed, dtype = match.groups()
    if flag:
        update = _FLAGS[flag]
    elif counted == "page":
        update = {"kv": "paged", "page_size": _bounded_int(count)}
    elif counted:
        update = {COUNTED[counted]: _bounded_int(count)}
    elif softcap:
        update = {"softcap": float(value)}
    else:
        update = {f"{typed}_dtype": dtype}
    if clash := update.keys() & fields.keys():
        raise ProblemError(f"problem {text!r}: feature {token!r} contradicts an earlier one ({clash.pop()} is already set)")
    fields.update(update)
