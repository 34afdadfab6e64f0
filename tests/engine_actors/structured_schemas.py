"""Schemas of realistic size and style, for the tests of structured output. Each can be enforced as it is."""

from __future__ import annotations

from typing import Any

_ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "maxLength": 40},
        "city": {"type": "string"},
        "zip": {"type": "string", "pattern": "^\\d{5}(-\\d{4})?$"},
        "country": {"enum": ["DE", "FR", "US", "JP"]},
    },
    "required": ["street", "city", "country"],
    "additionalProperties": False,
}

REALISTIC: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
    },
    "person_with_address": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "address": _ADDRESS,
            "emails": {"type": "array", "items": {"type": "string", "format": "email"}, "maxItems": 3},
        },
        "required": ["name", "address"],
    },
    "enum_only": {"enum": ["red", "green", "blue", 7, None, True, {"a": [1]}]},
    "const": {"const": {"kind": "fixed", "n": 1.5}},
    "nullable": {"type": ["string", "null"], "maxLength": 12},
    "union_of_types": {"type": ["integer", "boolean", "null"]},
    "any_of": {
        "anyOf": [
            {"type": "integer"},
            {"type": "string", "maxLength": 5},
            {"type": "array", "items": {"type": "boolean"}},
        ]
    },
    "discriminated": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0}},
                "required": ["kind", "radius"],
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "square"}, "side": {"type": "number", "minimum": 0.5}},
                "required": ["kind", "side"],
            },
        ]
    },
    "pydantic_style": {
        "$defs": {
            "Color": {"enum": ["red", "blue"], "title": "Color", "type": "string"},
            "Item": {
                "properties": {
                    "color": {"$ref": "#/$defs/Color"},
                    "price": {"title": "Price", "type": "number"},
                    "tag": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Tag"},
                },
                "required": ["color", "price"],
                "title": "Item",
                "type": "object",
            },
        },
        "properties": {
            "items": {"items": {"$ref": "#/$defs/Item"}, "title": "Items", "type": "array"},
            "main": {"allOf": [{"$ref": "#/$defs/Item"}], "description": "x"},
        },
        "required": ["items", "main"],
        "title": "Order",
        "type": "object",
    },
    "recursive_tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["value"],
            }
        },
        "$ref": "#/$defs/node",
    },
    "recursive_list": {
        "type": "object",
        "properties": {"head": {"type": "boolean"}, "tail": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["head", "tail"],
    },
    "formats": {
        "type": "object",
        "properties": {
            name.replace("-", "_"): {"type": "string", "format": name}
            for name in ("date", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "uri")
        },
        "required": ["date", "date_time", "uuid", "ipv4"],
    },
    "formats_with_lengths": {
        "type": "object",
        "properties": {
            "mail": {"type": "string", "format": "email", "maxLength": 30},
            "site": {"type": "string", "format": "uri", "maxLength": 100},
            "host": {"type": "string", "format": "hostname", "minLength": 1, "maxLength": 40},
        },
        "required": ["mail", "site", "host"],
    },
    "numbers": {
        "type": "object",
        "properties": {
            "percent": {"type": "number", "minimum": 0, "maximum": 100},
            "probability": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            "celsius": {"type": "number", "minimum": -273.15},
            "port": {"type": "integer", "minimum": 1, "maximum": 65535},
            "even": {"type": "integer", "multipleOf": 2},
            "step": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
            "any": {"type": "number"},
        },
        "required": ["percent", "probability", "celsius", "port", "even", "step", "any"],
    },
    "strings": {
        "type": "object",
        "properties": {
            "short": {"type": "string", "minLength": 1, "maxLength": 8},
            "long": {"type": "string", "minLength": 3, "maxLength": 300},
            "slug": {"type": "string", "pattern": "^[a-z0-9]+(-[a-z0-9]+)*$", "maxLength": 20},
            "starts": {"type": "string", "pattern": "^[A-Z]", "maxLength": 12},
            "not_blank": {"type": "string", "pattern": "\\S", "maxLength": 20},
            "quoted": {"type": "string", "pattern": '^"[a-z]*"$'},
            "phone": {"type": "string", "pattern": "^(\\([0-9]{3}\\))?[0-9]{3}-[0-9]{4}$"},
        },
        "required": ["short", "slug", "starts", "not_blank", "quoted", "phone"],
    },
    "arrays": {
        "type": "object",
        "properties": {
            "none": {"type": "array", "maxItems": 0},
            "pair": {
                "type": "array",
                "prefixItems": [{"type": "string", "maxLength": 4}, {"type": "integer"}],
                "items": False,
                "minItems": 2,
            },
            "open_tuple": {
                "type": "array",
                "prefixItems": [{"type": "boolean"}],
                "items": {"type": "null"},
                "minItems": 2,
                "maxItems": 4,
            },
            "matrix": {
                "type": "array",
                "items": {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 0, "maximum": 9},
                    "minItems": 2,
                    "maxItems": 2,
                },
                "minItems": 1,
                "maxItems": 3,
            },
        },
        "required": ["none", "pair", "open_tuple", "matrix"],
    },
    "draft7_tuple": {
        "type": "array",
        "items": [{"type": "string", "maxLength": 3}, {"type": "null"}],
        "additionalItems": False,
    },
    "map_of_numbers": {"type": "object", "additionalProperties": {"type": "number"}},
    "map_with_key_pattern": {
        "type": "object",
        "patternProperties": {"^[a-z]{1,4}$": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "map_with_property_names": {
        "type": "object",
        "propertyNames": {"maxLength": 3},
        "additionalProperties": {"type": "null"},
        "minProperties": 1,
        "maxProperties": 3,
    },
    "open_object": {
        "type": "object",
        "properties": {"id": {"type": "integer"}},
        "required": ["id"],
        "additionalProperties": {"type": "string", "maxLength": 6},
    },
    "free_object": {"type": "object"},
    "required_without_properties": {"type": "object", "required": ["a", "b"]},
    "counted_members": {
        "type": "object",
        "properties": {c: {"type": "null"} for c in "abcd"},
        "minProperties": 2,
        "maxProperties": 3,
        "additionalProperties": False,
    },
    "any_of_required": {
        "type": "object",
        "properties": {"email": {"type": "string", "maxLength": 5}, "phone": {"type": "string", "maxLength": 5}},
        "anyOf": [{"required": ["email"]}, {"required": ["phone"]}],
    },
    "all_of_inheritance": {
        "$defs": {
            "base": {"type": "object", "properties": {"id": {"type": "integer", "minimum": 1}}, "required": ["id"]}
        },
        "allOf": [
            {"$ref": "#/$defs/base"},
            {
                "type": "object",
                "properties": {"id": {"type": "integer", "maximum": 50}, "name": {"type": "string", "maxLength": 4}},
                "required": ["name"],
            },
        ],
    },
    "tool_call": {
        "type": "array",
        "items": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": "get_weather"},
                        "arguments": {
                            "type": "object",
                            "properties": {"city": {"type": "string", "maxLength": 9}, "unit": {"enum": ["c", "f"]}},
                            "required": ["city"],
                        },
                    },
                    "required": ["name", "arguments"],
                },
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": "stop"},
                        "arguments": {"type": "object", "properties": {}, "additionalProperties": False},
                    },
                    "required": ["name", "arguments"],
                },
            ]
        },
        "minItems": 1,
        "maxItems": 2,
    },
    "fifty_required": {
        "type": "object",
        "properties": {
            f"field_{i:02}": [{"type": "boolean"}, {"type": "integer"}, {"enum": ["x", "y"]}, {"type": "null"}][i % 4]
            for i in range(52)
        },
        "required": [f"field_{i:02}" for i in range(52)],
    },
    "sixty_optional": {
        "type": "object",
        "properties": {
            f"p{i}": [{"type": "boolean"}, {"type": "integer"}, {"type": "string", "maxLength": 4}][i % 3]
            for i in range(60)
        },
        "additionalProperties": False,
    },
    "deeply_nested": {
        "type": "object",
        "properties": {
            "a": {
                "type": "object",
                "properties": {
                    "b": {
                        "type": "object",
                        "properties": {
                            "c": {
                                "type": "array",
                                "items": {"type": "object", "properties": {"d": {"enum": [1, 2]}}, "required": ["d"]},
                                "minItems": 1,
                                "maxItems": 2,
                            }
                        },
                        "required": ["c"],
                    }
                },
                "required": ["b"],
            }
        },
        "required": ["a"],
    },
    "odd_names": {
        "type": "object",
        "properties": {
            'with "quotes"': {"type": "null"},
            "naïve €": {"type": "null"},
            "back\\slash": {"type": "null"},
            "": {"type": "null"},
        },
        "required": ['with "quotes"', "naïve €", "back\\slash", ""],
    },
    "invoice": {
        "type": "object",
        "properties": {
            "number": {"type": "string", "pattern": "^INV-[0-9]{4}$"},
            "issued": {"type": "string", "format": "date"},
            "lines": {
                "type": "array",
                "minItems": 1,
                "maxItems": 3,
                "items": {
                    "type": "object",
                    "properties": {
                        "text": {"type": "string", "maxLength": 10},
                        "amount": {"type": "number", "minimum": 0, "maximum": 1000000},
                        "vat": {"enum": [0, 7, 19]},
                    },
                    "required": ["text", "amount", "vat"],
                    "additionalProperties": False,
                },
            },
            "paid": {"type": "boolean"},
            "notes": {"type": ["string", "null"], "maxLength": 10},
        },
        "required": ["number", "issued", "lines", "paid"],
    },
    "openapi_style": {
        "components": {
            "schemas": {
                "Pet": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "integer", "format": "int64"},
                        "name": {"type": "string", "nullable": True, "example": "Rex", "maxLength": 5},
                    },
                    "required": ["id", "name"],
                }
            }
        },
        "type": "object",
        "properties": {
            "pets": {"type": "array", "items": {"$ref": "#/components/schemas/Pet"}, "maxItems": 2},
            "x-order": {"type": "null"},
        },
        "required": ["pets"],
        "x-vendor": "anything",
    },
    "without_types": {
        "properties": {"a": {"minimum": 3, "maximum": 9}, "b": {"maxLength": 3}, "c": {"items": {"type": "null"}}},
        "required": ["a", "b", "c"],
    },
    "one_of_types": {
        "oneOf": [
            {"type": "string", "maxLength": 3},
            {"type": "integer"},
            {"type": "null"},
            {"type": "array", "items": {"type": "integer"}},
        ]
    },
    "one_of_ranges": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "integer", "minimum": 100}]},
    "integer_formats": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "format": "int32"},
            "b": {"type": "integer", "format": "uint8"},
            "c": {"type": "number", "format": "double"},
        },
        "required": ["a", "b", "c"],
    },
    "draft4_bounds": {"type": "number", "minimum": 1, "exclusiveMinimum": True, "maximum": 2},
    "big_enum": {"enum": [f"value {i} of many" for i in range(300)]},
    "boolean_schemas": {
        "type": "object",
        "properties": {"any": True, "never": False},
        "required": ["any"],
        "additionalProperties": False,
    },
    "anchors": {
        "$defs": {"n": {"$anchor": "num", "type": "integer"}},
        "type": "array",
        "items": {"$ref": "#num"},
        "maxItems": 3,
    },
    "escaped_pointers": {"$defs": {"a/b": {"~c": {"type": "null"}}}, "$ref": "#/$defs/a~1b/~0c"},
    "mutual_recursion": {
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}},
            "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 2},
        },
        "$ref": "#/$defs/a",
    },
}
